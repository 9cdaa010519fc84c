"""One choice's tokens as visible text, with every token's place in that text.

Text is held back while a stop string may be forming or a character is unfinished; what is
reported about a token waits until the text that it forms is visible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.output_text import OutputText
from engine.request import FinishReason, NewRequest, RequestUpdate, TokenLogprob
from engine.tokens import TextStream, Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedToken:
    """A token with its log-probability and the place of its text among the visible text.

    `start` counts characters from the beginning of the choice's output. `data` are the
    token's bytes as far as they are visible: none of a skipped control token or of one behind
    the cut of a stop string.
    """

    logprob: TokenLogprob
    start: int
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceDelta:
    """What one update adds to one choice. `token_ids` are all that were committed.

    `num_drafted` and `num_accepted` are totals of the choice so far, as in `RequestUpdate`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    placed: Sequence[PlacedToken] = ()
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class _HeldToken:
    logprob: TokenLogprob
    start: int
    end: int
    data: bytes
    data_end: int


@dataclass(slots=True)
class _RecordedStream:
    """A TextStream that counts the characters it has given."""

    inner: TextStream
    text_len: int = 0

    def push(self, token_ids: Sequence[int]) -> str:
        text = self.inner.push(token_ids)
        self.text_len += len(text)
        return text

    def flush(self) -> str:
        text = self.inner.flush()
        self.text_len += len(text)
        return text


class ChoiceText:
    """Turns the updates of one request into deltas of its choice."""

    def __init__(self, index: int, request: NewRequest, tokenizer: Tokenizer) -> None:
        params = request.params
        self._index = index
        self._params = params
        self._tokenizer = tokenizer
        self._stream = _RecordedStream(
            tokenizer.stream(
                request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        )
        self._output = OutputText(self._stream, params)
        self._held: deque[_HeldToken] = deque()
        self._visible_len = 0
        self._num_visible_bytes = 0
        self._num_token_bytes = 0
        self._has_replacement = False

    def push(self, update: RequestUpdate) -> ChoiceDelta:
        """The delta of one update."""
        text = ""
        last = len(update.token_ids) - 1
        for position, token_id in enumerate(update.token_ids):
            start = self._stream.text_len
            is_ending = position == last and is_ended_by_token(update)
            if not is_ending:
                text += self._output.push(token_id)
            if update.logprobs is not None:
                self._hold(update.logprobs[position], start, is_silent=is_ending)
        if update.finish_reason is not None and self._output.stop_string is None:
            text += self._output.finish()
        self._visible_len += len(text)
        self._num_visible_bytes += len(text.encode())
        self._has_replacement |= REPLACEMENT_CHARACTER in text
        return ChoiceDelta(
            index=self._index,
            text=text,
            token_ids=update.token_ids,
            placed=self._release(is_final=update.finish_reason is not None),
            prompt_logprobs=update.prompt_logprobs,
            finish_reason=update.finish_reason,
            num_drafted=update.num_drafted,
            num_accepted=update.num_accepted,
        )

    def _hold(self, logprob: TokenLogprob, start: int, *, is_silent: bool) -> None:
        is_skipped = self._params.skip_special_tokens and (
            logprob.token_id in self._tokenizer.special_ids
        )
        silent = is_silent or is_skipped
        data = b"" if silent else self._tokenizer.token_bytes(logprob.token_id)
        self._num_token_bytes += len(data)
        self._held.append(
            _HeldToken(logprob, start, self._stream.text_len, data, self._num_token_bytes)
        )

    def _release(self, *, is_final: bool) -> list[PlacedToken]:
        released = []
        while self._held:
            token = self._held[0]
            is_complete = (
                token.end <= self._visible_len and token.data_end <= self._num_visible_bytes
            )
            if not (is_final or is_complete):
                break
            self._held.popleft()
            released.append(self._place(token))
        return released

    def _place(self, token: _HeldToken) -> PlacedToken:
        visible_len = self._visible_len
        data = token.data
        if self._output.stop_string is not None:
            # U+FFFD stands for bytes of another number, so then only whole tokens are cut.
            surplus = token.data_end - self._num_visible_bytes
            if token.start >= visible_len:
                data = b""
            elif not self._has_replacement and surplus > 0:
                data = data[: max(0, len(data) - surplus)]
        return PlacedToken(
            logprob=token.logprob,
            start=min(token.start, visible_len),
            data=data,
        )


class ChoiceTokens:
    """Deltas of a choice where there is no tokenizer: ids and log-probabilities, no text."""

    def __init__(self, index: int) -> None:
        self._index = index

    def push(self, update: RequestUpdate) -> ChoiceDelta:
        """The delta of one update."""
        return ChoiceDelta(
            index=self._index,
            text="",
            token_ids=update.token_ids,
            placed=[
                PlacedToken(logprob=entry, start=0, data=b"") for entry in update.logprobs or ()
            ],
            prompt_logprobs=update.prompt_logprobs,
            finish_reason=update.finish_reason,
            num_drafted=update.num_drafted,
            num_accepted=update.num_accepted,
        )


def is_ended_by_token(update: RequestUpdate) -> bool:
    """Whether the update's last token is an EOS or a stop token id, which have no text."""
    return update.finish_reason == FinishReason.STOP and not isinstance(update.stop_reason, str)
