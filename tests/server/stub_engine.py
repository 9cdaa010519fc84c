"""A deterministic engine for the tests of everything in front of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from engine.client import EngineDeadError, EngineInfo, EngineStats, QueueFullError
from engine.draft_counts import DraftCounts
from engine.memory import FixedBytes, MemoryPlan, UnitBytes
from engine.output_text import OutputText
from engine.request import (
    FinishReason,
    NewRequest,
    RequestLimits,
    RequestUpdate,
    TokenLogprob,
)
from engine.tokens import Tokenizer

EOS = 8185


STUB_MEMORY = MemoryPlan(
    free_bytes=20_000_000,
    budget_bytes=10_000_000,
    fixed=FixedBytes(
        weights=1_000_000,
        graphs=0,
        activations=200_000,
        sampling=30_000,
        tables=4_000,
        drafts=0,
        reserve=500,
    ),
    units=UnitBytes(
        kv_per_token=512,
        gdn_per_slot=100_000,
        sampling_per_slot=1_000,
        verify_scratch_per_row=6_000,
        draft_per_slot=700,
    ),
    page_size=64,
    num_pages=64,
    num_slots=8,
)


def stub_info(max_model_len: int = 256) -> EngineInfo:
    """Facts of an engine with the embedded model's vocabulary."""
    return EngineInfo(
        version="0",
        model_type="stub",
        dtype="float32",
        device="cpu",
        limits=RequestLimits(max_model_len=max_model_len, max_kv_tokens=4096, vocab_size=8192),
        eos_token_ids=[EOS],
        page_size=64,
        num_pages=64,
        num_slots=8,
        max_running_requests=8,
        startup_s={"load": 0.5, "ready": 1.0},
        memory=STUB_MEMORY,
    )


def logprob_of(token_id: int, num_top: int) -> TokenLogprob:
    """A greedy token: its own log-probability is the largest of `num_top`."""
    best = -math.log2(token_id + 2) / 7
    top = [((token_id + rank) % 8192, best - rank / 3) for rank in range(num_top)]
    return TokenLogprob(token_id, best, top)


@dataclass
class StubEngine:
    """An `EngineClient` that answers every request with `reply(request)`, then EOS.

    It keeps the contract of `RequestUpdate`: stop strings, stop ids and max_tokens end the
    output where an engine would. `hold_after` tokens it waits for `gate`. With `num_drafts`
    every update tells of a step that scored so many, and accepted all its tokens but one. Where
    an engine would count them is `draft_counts`. `finished` and `aborted` hold request ids;
    `most_open` is how many requests ran together at most.
    """

    tokenizer: Tokenizer | None
    reply: Callable[[NewRequest], Sequence[int]]
    info: EngineInfo = field(default_factory=stub_info)
    tokens_per_update: int = 1
    num_drafts: int = 0
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    hold_after: int | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failure: RequestUpdate | None = None
    is_full: bool = False
    is_alive: bool = True
    is_closed: bool = False
    requests: list[NewRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    most_open: int = 0

    async def generate(self, request: NewRequest) -> AsyncIterator[RequestUpdate]:
        self.check_alive()
        if self.is_full:
            raise QueueFullError
        self.requests.append(request)
        self.most_open = max(self.most_open, self.num_open)
        num_sent = 0
        try:
            for update in self.updates(request):
                if self.hold_after is not None and num_sent >= self.hold_after:
                    await self.gate.wait()
                self.check_alive()
                await asyncio.sleep(0)
                num_sent += len(update.token_ids)
                if update.finish_reason is not None:
                    self.finished.append(request.request_id)
                yield update
        finally:
            if request.request_id not in self.finished:
                self.aborted.append(request.request_id)

    def updates(self, request: NewRequest) -> list[RequestUpdate]:
        """The whole run of one request, cut into updates."""
        if self.failure is not None:
            return [self.failure]
        ids, reason, stop_reason = self.committed(request)
        params = request.params
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            rest = request.prompt_token_ids[1:]
            prompt_logprobs = [None, *(logprob_of(i, params.prompt_logprobs) for i in rest)]
        parts = [
            ids[i : i + self.tokens_per_update] for i in range(0, len(ids), self.tokens_per_update)
        ] or [[]]
        return [
            RequestUpdate(
                request_id=request.request_id,
                token_ids=part,
                logprobs=(
                    None
                    if params.logprobs is None
                    else [logprob_of(i, params.logprobs) for i in part]
                ),
                prompt_logprobs=prompt_logprobs if index == 0 else None,
                finish_reason=reason if index == len(parts) - 1 else None,
                stop_reason=stop_reason if index == len(parts) - 1 else None,
                queue_s=0.5 if index == 0 else None,
                num_drafted=self.num_drafts * (index + 1),
                num_accepted=min(self.num_drafts, 1)
                * sum(len(done) - 1 for done in parts[: index + 1]),
            )
            for index, part in enumerate(parts)
        ]

    def committed(self, request: NewRequest) -> tuple[list[int], FinishReason, int | str | None]:
        """The tokens of the output and how it ends."""
        params = request.params
        output = None
        if self.tokenizer is not None:
            stream = self.tokenizer.stream(
                request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
            output = OutputText(stream, params)
        ids: list[int] = []
        assert params.max_tokens is not None
        for token_id in [*self.reply(request), EOS]:
            if len(ids) == params.max_tokens:
                return ids, FinishReason.LENGTH, None
            ids.append(token_id)
            if token_id == EOS and not params.ignore_eos:
                return ids, FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return ids, FinishReason.STOP, token_id
            if output is not None:
                output.push(token_id)
                if output.stop_string is not None:
                    return ids, FinishReason.STOP, output.stop_string
        return ids, FinishReason.LENGTH, None

    @property
    def num_open(self) -> int:
        """Requests that have neither finished nor been aborted."""
        return len(self.requests) - len(self.finished) - len(self.aborted)

    def check_alive(self) -> None:
        """Raise EngineDeadError once the engine has died."""
        if not self.is_alive:
            raise EngineDeadError("the stub died")

    def die(self) -> None:
        """Fail like an engine whose process was killed."""
        self.is_alive = False
        self.gate.set()

    async def stats(self) -> EngineStats:
        self.check_alive()
        return EngineStats(
            num_requests_running=self.num_open,
            num_pages_used=16,
            num_slots_used=3,
            num_steps_total=7,
            num_recompilations_total=2,
            num_drafts_total=self.draft_counts.num_drafts,
            num_draft_tokens_total=self.draft_counts.num_draft_tokens,
            num_accepted_tokens_total=self.draft_counts.num_accepted_tokens,
            num_accepted_per_position=self.draft_counts.num_accepted_per_position,
        )

    async def close(self) -> None:
        self.is_closed = True


def reply_with(tokenizer: Tokenizer, text: str) -> Callable[[NewRequest], list[int]]:
    """A `reply` that gives the tokens of `text` to every request."""
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=False)
    return lambda request: ids
