"""Log-probabilities in the three forms of the API.

They are the raw log-softmax of the model, before penalties and masks. JSON has no infinity,
so they end at `MIN_LOGPROB`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import TokenLogprob
from engine.tokens import Tokenizer
from server.service.response_schema import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprobEntry,
    TopLogprob,
)
from server.service.text import PlacedToken

MIN_LOGPROB = -9999.0


def clamp(logprob: float) -> float:
    """A log-probability that JSON can carry (NaN becomes the least one)."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """How a token is written in log-probabilities."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_string(token_id)


def chat_logprobs(tokenizer: Tokenizer, placed: Sequence[PlacedToken]) -> ChatLogprobs:
    """One entry per token that shows text; their bytes joined are the text's bytes.

    A token that a stop string cuts in two is shown as far as the text goes, with the
    log-probability of the whole token.
    """
    return ChatLogprobs([_chat_entry(tokenizer, token) for token in placed if token.data])


def _chat_entry(tokenizer: Tokenizer, placed: PlacedToken) -> TokenLogprobEntry:
    logprob = placed.logprob
    is_whole = placed.data == tokenizer.token_bytes(logprob.token_id)
    token = (
        tokenizer.token_string(logprob.token_id)
        if is_whole
        else placed.data.decode(errors="replace")
    )
    return TokenLogprobEntry(
        token=token,
        logprob=clamp(logprob.logprob),
        bytes=list(placed.data),
        top_logprobs=[
            TopLogprob(
                tokenizer.token_string(token_id),
                clamp(value),
                list(tokenizer.token_bytes(token_id)),
            )
            for token_id, value in logprob.top
        ],
    )


@dataclass
class CompletionLogprobsBuilder:
    """Gathers the parallel lists of a text completion's `logprobs`."""

    tokenizer: Tokenizer | None
    num_top: int
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, logprob: TokenLogprob | None, offset: int) -> None:
        """Append one token; `logprob` is None for the first token of a prompt."""
        self.tokens.append(token_text(self.tokenizer, token_id))
        self.token_logprobs.append(None if logprob is None else clamp(logprob.logprob))
        self.top_logprobs.append(None if logprob is None else self._candidates(logprob))
        self.text_offset.append(offset)

    def _candidates(self, logprob: TokenLogprob) -> dict[str, float]:
        candidates: dict[str, float] = {}
        # Different tokens can read alike (pieces of a character); the likeliest one counts.
        for token_id, value in (*logprob.top[: self.num_top], (logprob.token_id, logprob.logprob)):
            text = token_text(self.tokenizer, token_id)
            candidates[text] = max(clamp(value), candidates.get(text, MIN_LOGPROB))
        return candidates

    def build(self) -> CompletionLogprobs:
        """The finished object."""
        return CompletionLogprobs(
            self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset
        )


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob | None]
) -> PromptLogprobs:
    """Candidates by token id for every prompt position, the prompt's own token included."""
    return [None if entry is None else _prompt_candidates(tokenizer, entry) for entry in entries]


def _prompt_candidates(
    tokenizer: Tokenizer | None, entry: TokenLogprob
) -> dict[int, PromptLogprob]:
    candidates = {
        token_id: PromptLogprob(clamp(value), rank, token_text(tokenizer, token_id))
        for rank, (token_id, value) in enumerate(entry.top, start=1)
    }
    candidates.setdefault(
        entry.token_id,
        PromptLogprob(clamp(entry.logprob), None, token_text(tokenizer, entry.token_id)),
    )
    return candidates
