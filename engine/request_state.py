"""One request inside the engine: its tokens, what it owns, how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.output_text import OutputText
from engine.request import FinishReason, NewRequest, SamplingParams, TokenLogprob


@dataclass(eq=False)
class RequestState:
    """Owned by the scheduler; only admission, launch, preemption and drain change it.

    `num_computed` counts the leading tokens whose keys, values and GDN updates are in the
    caches for all that the host knows: those of drained steps. `num_launched` adds those of
    the `num_steps_in_flight` steps that were launched and not drained, of which
    `num_tokens_in_flight` choose a token. `num_prefill` is the number of tokens known at
    admission: prefill processes these and chooses one, decode goes on from there.
    `num_drafted` and `num_accepted` count drafts that were scored, and those that became tokens.
    `slot` and `pages` are set from admission until the request is over and no step in flight
    uses them. `num_undelivered` counts output tokens, with their log-probabilities, that no
    update has told the caller yet.
    """

    request: NewRequest
    seed: int
    output_text: OutputText | None
    output_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    num_computed: int = 0
    num_launched: int = 0
    num_steps_in_flight: int = 0
    num_tokens_in_flight: int = 0
    num_prefill: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
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
    def is_over(self) -> bool:
        """Whether nothing may be committed any more."""
        return self.is_aborted or self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether all rows of the prefill were launched: only decode rows can follow."""
        return self.num_launched >= self.num_prefill

    @property
    def next_output_index(self) -> int:
        """Output tokens before the one that the next sampling row chooses, with those in flight."""
        return len(self.output_token_ids) + self.num_tokens_in_flight

    @property
    def num_state_tokens(self) -> int:
        """Leading tokens that the slot's GDN state contains once all launched steps have run.

        The label of a snapshot taken then. A request that decodes has one token more than its
        state, `num_tokens - 1`. With overlap a request that stops has launched a further row
        already: its state contains `num_tokens`, or more than that when an abort or bad logits
        kept a chosen token from being committed, or a stop string cut the tokens that a verify
        step had accepted. Such a state belongs to no committed text.
        """
        return self.num_launched

    def admit(self, slot: int, pages: list[int]) -> None:
        """Own a slot and pages; everything known now is to be prefilled."""
        self.slot, self.pages = slot, pages
        self.num_prefill = self.num_tokens
        # Only the first admission ends the wait: a preempted request was served already.
        if self.queue_s is None:
            self.queue_s = time.monotonic() - self.submitted_s

    def launch(self, num_rows: int, *, samples: bool) -> None:
        """A step with this request's next rows was launched."""
        self.num_launched += num_rows
        self.num_steps_in_flight += 1
        self.num_tokens_in_flight += samples

    def land(self, num_rows: int, *, samples: bool, num_rejected: int = 0) -> None:
        """The oldest step in flight with rows of this request was drained.

        The last `num_rejected` of its rows are rolled back: the next step's are at their positions.
        """
        self.num_computed += num_rows - num_rejected
        self.num_launched -= num_rejected
        self.num_steps_in_flight -= 1
        self.num_tokens_in_flight -= samples

    def restart(self) -> None:
        """After a preemption nothing of the request is in the caches."""
        assert self.num_steps_in_flight == 0
        self.num_computed = self.num_launched = self.num_prefill = 0

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop - 1 of prompt + output."""
        prompt, split = self.request.prompt_token_ids, self.num_prompt
        if stop <= split:
            return prompt[start:stop]
        tail = self.output_token_ids[max(start - split, 0) : stop - split]
        return tail if start >= split else prompt[start:] + tail
