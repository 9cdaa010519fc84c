"""One request inside the engine: its tokens, what it owns, how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.output_text import OutputText
from engine.request import FinishReason, NewRequest, SamplingParams, TokenLogprob


@dataclass(eq=False)
class RequestState:
    """Owned by the scheduler; only admission, preemption and drain change it.

    `num_computed` counts the leading tokens whose keys, values and GDN updates are in the
    caches. A request decodes when exactly its last token is not among them.
    `slot` and `pages` are set from admission to release. `num_undelivered` counts output
    tokens, with their log-probabilities, that no update has told the caller yet.
    """

    request: NewRequest
    seed: int
    output_text: OutputText | None
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_computed: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    is_aborted: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_undelivered: int = 0
    undelivered_logprobs: list[TokenLogprob] = field(default_factory=list)
    has_delivered: bool = False
    submitted_s: float = field(default_factory=time.monotonic)
    queue_s: float | None = None

    def leave_queue(self) -> None:
        """Note how long the request waited, the first time it is admitted."""
        if self.queue_s is None:
            self.queue_s = time.monotonic() - self.submitted_s

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and committed output."""
        return self.num_prompt + len(self.output_token_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that a forward has yet to process."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the next forward of this request is one decode row."""
        return bool(self.output_token_ids) and self.num_pending == 1

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop - 1 of prompt + output."""
        prompt, split = self.request.prompt_token_ids, self.num_prompt
        if stop <= split:
            return prompt[start:stop]
        tail = self.output_token_ids[max(start - split, 0) : stop - split]
        return tail if start >= split else prompt[start:] + tail
