"""Runs steps on the device: inputs up, one forward, sampling, results down.

Knows nothing of queues or of why a request is in a batch. Steps run in order on one worker
thread, so that `launch` returns at once and the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from engine.batch import Batch, StepResult, build_inputs
from engine.models.hybrid import ForwardFunctions, HybridModel
from engine.request import MAX_TOP_LOGPROBS
from engine.sampler import (
    NoiseFunction,
    Sampled,
    TokenScores,
    plan_sampling,
    sample,
    score_tokens,
)
from engine.sampling_rows import SamplingTable

# Log-softmax of a whole prefill chunk would need chunk × vocabulary floats at once.
SCORED_ROWS_AT_ONCE = 64


class PendingStep:
    """A launched step; its result is awaited once."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    async def wait(self) -> StepResult:
        """The step's result, as soon as the device has it. Raises what the step raised."""
        return await asyncio.wrap_future(self._future)


class Runner:
    """Owns the model, the sampling table and the one thread that launches device work."""

    def __init__(
        self,
        model: HybridModel,
        run: ForwardFunctions,
        table: SamplingTable,
        thread: ThreadPoolExecutor,
        make_noise: NoiseFunction,
        *,
        page_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._model, self._forward, self._table = model, run, table
        self._page_size, self._device = page_size, device
        self._eos_token_ids = tuple(eos_token_ids)
        self._thread, self._make_noise = thread, make_noise

    def launch(self, batch: Batch) -> PendingStep:
        """Start a step behind those launched before; never blocks."""
        return PendingStep(self._thread.submit(self._run, batch))

    def close(self) -> None:
        """Wait for the step in flight, stop the thread and let the model go; call it once."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        # A closed engine may stay referenced; its weights and pools must not.
        del self._model, self._table, self._forward, self._make_noise

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepResult:
        for state in batch.admitted:
            assert state.slot is not None
            self._table.set_row(
                state.slot,
                state.params,
                seed=state.seed,
                eos_ids=self._eos_token_ids,
                prompt_token_ids=state.request.prompt_token_ids,
                output_token_ids=state.output_token_ids,
            )
        inputs = build_inputs(batch, self._page_size, self._device)
        logits = self._model(inputs, self._forward)
        num_sampled = len(batch.sampling_entries)
        sampled = self._sample(batch, logits[:num_sampled])
        scores = score_prompts(batch, logits[num_sampled:])
        if sampled is None:
            return StepResult([], [], None, None, scores)
        return StepResult(
            token_ids=sampled.token_ids.tolist(),
            is_bad=sampled.is_bad.tolist(),
            logprobs=None if sampled.logprobs is None else sampled.logprobs.tolist(),
            tops=pair_tops(sampled.top_ids, sampled.top_logprobs),
            scores=scores,
        )

    def _sample(self, batch: Batch, logits: Tensor) -> Sampled | None:
        entries = batch.sampling_entries
        if not entries:
            return None
        states = [entry.state for entry in entries]
        num_outputs = [len(state.output_token_ids) for state in states]
        plan = plan_sampling([state.params for state in states], num_outputs)
        slots = torch.tensor([entry.slot for entry in entries], device=self._device)
        positions = torch.tensor(num_outputs, device=self._device)
        sampled = sample(logits, self._table, slots, positions, plan, self._make_noise)
        if plan.has_penalties:
            self._table.count_tokens(slots, sampled.token_ids)
        return sampled


def score_prompts(
    batch: Batch, logits: Tensor
) -> list[list[tuple[float, list[tuple[int, float]]]]]:
    """Log-probabilities of the prompt tokens after the scored rows (see `StepResult`)."""
    scores = []
    first = 0
    for entry in batch.entries:
        if entry.num_scored == 0:
            continue
        rows = logits[first : first + entry.num_scored]
        first += entry.num_scored
        following = entry.state.tokens_between(entry.start + 1, entry.start + 1 + entry.num_scored)
        targets = torch.tensor(following, device=logits.device)
        has_top = bool(entry.state.params.prompt_logprobs)
        pieces = [
            score_tokens(piece, piece_targets, MAX_TOP_LOGPROBS if has_top else 0)
            for piece, piece_targets in zip(
                rows.split(SCORED_ROWS_AT_ONCE), targets.split(SCORED_ROWS_AT_ONCE), strict=True
            )
        ]
        scores.append([item for piece in pieces for item in list_scores(piece)])
    return scores


def list_scores(scores: TokenScores) -> list[tuple[float, list[tuple[int, float]]]]:
    """One (log-probability, likeliest tokens) a row."""
    logprobs: list[float] = scores.logprobs.tolist()
    tops = pair_tops(scores.top_ids, scores.top_logprobs)
    return list(zip(logprobs, tops or [[] for _ in logprobs], strict=True))


def pair_tops(ids: Tensor | None, logprobs: Tensor | None) -> list[list[tuple[int, float]]] | None:
    """[R, n] ids and log-probabilities as lists of pairs, None when not asked for."""
    if ids is None or logprobs is None:
        return None
    return [
        list(zip(row_ids, row_logprobs, strict=True))
        for row_ids, row_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]
