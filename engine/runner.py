"""Runs steps on the device: inputs up, one forward, sampling, results down.

Knows nothing of queues or of why a request is in a batch. One thread launches steps in order and
never waits for the device; another waits for their results. So the event loop stays free, and
the next step can be launched while one runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import Batch, BatchEntry, StepResult, build_inputs
from engine.cache.pools import PADDING_INDEX
from engine.draft_steps import draft_request
from engine.models.hybrid import HybridModel
from engine.request import MAX_TOP_LOGPROBS
from engine.sampler import SamplingPlan, TokenScores, plan_sampling, score_tokens
from engine.spec_protocol import SpecRuntime
from engine.step_memory import SCORED_ROWS_AT_ONCE
from engine.step_set import StepSet
from engine.token_step import BAD_TOKEN, Chosen, covering_plan
from engine.transfer import download, upload
from graphs.compile import count_compilations
from graphs.inputs import Kind
from graphs.rows import LAST_TOKEN, NO_DRAFT, Row


@dataclass(frozen=True)
class LaunchedStep:
    """Results on their way to the host; readable once `done` has happened (None: already).

    `num_sampled`: requests that chose. `scores`: per scored entry, the pieces of its rows.
    `draft_ids`: what a verify step scored, of each request.
    """

    num_sampled: int
    chosen: Chosen | None
    scores: list[list[TokenScores]]
    done: torch.cuda.Event | None
    draft_ids: list[list[int]] | None = None

    def collect(self) -> StepResult:
        """Wait for the device, then read everything as plain values."""
        if self.done is not None:
            self.done.synchronize()
        scores = [
            [item for piece in pieces for item in list_scores(piece)] for pieces in self.scores
        ]
        if self.chosen is None:
            return StepResult([], [], None, None, scores)
        num_committed, rows = self._committed_rows(self.chosen)
        chosen = self.chosen._replace(num_committed=None).each(lambda field: field[rows])
        token_ids: list[int] = chosen.token_ids.tolist()
        return StepResult(
            token_ids=token_ids,
            is_bad=[token_id == BAD_TOKEN for token_id in token_ids],
            logprobs=None if chosen.logprobs is None else chosen.logprobs.tolist(),
            tops=pair_tops(chosen.top_ids, chosen.top_logprobs),
            scores=scores,
            num_committed=num_committed,
            draft_ids=self.draft_ids,
        )

    def _committed_rows(self, chosen: Chosen) -> tuple[list[int] | None, slice | list[int]]:
        """How many rows of each request are committed, in a verify step, and which rows those are.

        Requests past num_sampled are padding.
        """
        if chosen.num_committed is None:
            return None, slice(self.num_sampled)
        rows_per_request = len(chosen.token_ids) // len(chosen.num_committed)
        num_committed: list[int] = chosen.num_committed[: self.num_sampled].tolist()
        return num_committed, [
            index * rows_per_request + row
            for index, count in enumerate(num_committed)
            for row in range(count)
        ]


class PendingStep:
    """A launched step; its result is awaited once."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def result(self) -> StepResult:
        """As `wait`, but blocks the calling thread."""
        return self._future.result()

    async def wait(self) -> StepResult:
        """The step's result, as soon as the device has it. Raises what the step raised."""
        return await asyncio.wrap_future(self._future)


class Runner:
    """Owns the model, the slots' tables and the threads that launch and collect steps."""

    def __init__(
        self,
        model: HybridModel,
        steps: StepSet,
        launch_thread: ThreadPoolExecutor,
        *,
        page_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        spec: SpecRuntime | None = None,
    ) -> None:
        self._spec = spec
        self._model, self._functions, self._decode = model, steps.functions, steps.decode
        self._tables, self._sampling = steps.tables, steps.sampling
        self._page_size, self._device = page_size, device
        self._eos_token_ids = tuple(eos_token_ids)
        self._launch_thread = launch_thread
        self._collect_thread = ThreadPoolExecutor(1, "collect")
        self._num_compilations = count_compilations()

    def launch(self, batch: Batch) -> PendingStep:
        """Start a step behind those launched before; never blocks."""
        if self._device.type == "cpu":  # one thread less to wake
            return PendingStep(self._launch_thread.submit(lambda: self._run(batch).collect()))
        launched = self._launch_thread.submit(self._run, batch)
        return PendingStep(self._collect_thread.submit(lambda: launched.result().collect()))

    def expect_no_compilation(self) -> None:
        """From now on each compilation counts as one that should not have been."""
        self._num_compilations = count_compilations()

    @property
    def num_recompilations(self) -> int:
        """Compilations since they were no longer expected, in the whole process."""
        return count_compilations() - self._num_compilations

    def close(self) -> None:
        """Wait for the steps in flight, stop the threads and let the model go; call it once."""
        for thread in (self._launch_thread, self._collect_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        # A closed engine may stay referenced; its weights, pools and graphs must not.
        del self._model, self._functions, self._decode, self._tables, self._sampling

    @torch.inference_mode()
    def _run(self, batch: Batch) -> LaunchedStep:
        for state in batch.admitted:
            assert state.slot is not None
            self._sampling.set_row(
                state.slot,
                state.params,
                seed=state.seed,
                eos_ids=self._eos_token_ids,
                prompt_token_ids=state.request.prompt_token_ids,
                output_token_ids=state.output_token_ids,
            )
        if batch.kind is Kind.DECODE:
            return self._launched(batch, self._decode_rows(batch), [])
        if batch.kind is Kind.VERIFY:
            draft_ids = self._propose(batch)
            return self._launched(batch, self._verify_rows(batch, draft_ids), [], draft_ids)
        return self._launched(batch, *self._prefill(batch))

    def _launched(
        self,
        batch: Batch,
        chosen: Chosen | None,
        scores: list[list[TokenScores]],
        draft_ids: list[list[int]] | None = None,
    ) -> LaunchedStep:
        """Start the copies to the host; `chosen` may belong to a graph, so they come first."""
        host_chosen = None if chosen is None else chosen.each(download)
        host_scores = [[piece.each(download) for piece in pieces] for pieces in scores]
        done = None
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record()
        return LaunchedStep(len(batch.sampling_entries), host_chosen, host_scores, done, draft_ids)

    def _decode_rows(self, batch: Batch) -> Chosen:
        page_size = self._page_size
        rows = [
            Row(
                slot=entry.slot,
                position=entry.start,
                page=entry.state.pages[entry.start // page_size],
                output_index=entry.output_index,
            )
            for entry in batch.entries
        ]
        return self._decode.run(rows, self._plan(batch.entries))

    def _propose(self, batch: Batch) -> list[list[int]]:
        assert self._spec is not None
        return self._spec.propose([draft_request(entry) for entry in batch.entries])

    def _verify_rows(self, batch: Batch, draft_ids: list[list[int]]) -> Chosen:
        """Every request's pending token, then its drafts, then rows without one."""
        page_size = self._page_size
        rows = []
        for entry, drafts in zip(batch.entries, draft_ids, strict=True):
            missing = [NO_DRAFT] * (entry.num_rows - 1 - len(drafts))
            rows += [
                Row(
                    slot=entry.slot,
                    position=entry.start + index,
                    page=entry.state.pages[(entry.start + index) // page_size],
                    output_index=entry.output_index + index,
                    token_id=token_id,
                )
                for index, token_id in enumerate((LAST_TOKEN, *drafts, *missing))
            ]
        return self._decode.run(rows, self._plan(batch.entries))

    def _plan(self, entries: Sequence[BatchEntry]) -> SamplingPlan:
        """A plan for these entries that decode steps are prepared for, where there is one.

        Prefills use it too: a request's tokens are all chosen in the same way.
        """
        plan = plan_sampling(
            [entry.state.params for entry in entries], [entry.output_index for entry in entries]
        )
        return covering_plan(self._decode.variants, plan)

    def _prefill(self, batch: Batch) -> tuple[Chosen | None, list[list[TokenScores]]]:
        inputs = build_inputs(batch, self._page_size, self._device)
        self._tables.set_pages(inputs.state_slots, inputs.page_table)
        forward = self._functions.forward
        hidden = self._model.hidden(inputs, forward)
        if self._spec is not None and self._spec.wants_features:
            row_slots = prefill_row_slots(batch, len(inputs.token_ids))
            features = self._model.features(hidden)
            self._spec.take_features(features, inputs, upload(row_slots, self._device))
        assert inputs.logit_rows is not None
        entries = batch.sampling_entries
        sampled_rows, scored_rows = inputs.logit_rows.split(
            [len(entries), len(inputs.logit_rows) - len(entries)]
        )
        scores = score_prompts(
            batch, scored_rows, lambda rows: self._model.logits(hidden, rows, forward)
        )
        if not entries:
            return None, scores
        chosen = self._functions.choose_any(
            self._model.logits(hidden, sampled_rows, forward),
            self._sampling,
            self._tables.last_tokens,
            upload([entry.slot for entry in entries], self._device),
            upload([entry.output_index for entry in entries], self._device),
            self._plan(entries),
            self._functions.kernels,
        )
        return chosen, scores


def prefill_row_slots(batch: Batch, num_rows: int) -> list[int]:
    """The slot of each row of a prefill that is padded to num_rows."""
    slots = [entry.slot for entry in batch.entries for _ in range(entry.num_rows)]
    return slots + [PADDING_INDEX] * (num_rows - len(slots))


def score_prompts(
    batch: Batch, rows: Tensor, logits_of: Callable[[Tensor], Tensor]
) -> list[list[TokenScores]]:
    """Scores of the prompt tokens after the scored rows [N], in pieces; see `LaunchedStep`.

    `logits_of` gives the logits [n, vocab] of some of the rows.
    """
    scores = []
    first = 0
    for entry in batch.entries:
        if entry.num_scored == 0:
            continue
        entry_rows = rows[first : first + entry.num_scored]
        first += entry.num_scored
        following = entry.state.tokens_between(entry.start + 1, entry.start + 1 + entry.num_scored)
        targets = upload(following, rows.device)
        num_top = MAX_TOP_LOGPROBS if entry.state.params.prompt_logprobs else 0
        scores.append(
            [
                score_tokens(logits_of(piece), piece_targets, num_top)
                for piece, piece_targets in zip(
                    entry_rows.split(SCORED_ROWS_AT_ONCE),
                    targets.split(SCORED_ROWS_AT_ONCE),
                    strict=True,
                )
            ]
        )
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
