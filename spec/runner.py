"""The engine's one `SpecRuntime`: a proposer's drafts, checked, and the tokens they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import index

from torch import Tensor

from engine.memory import DraftMemory
from engine.model_config import ModelConfig
from engine.request import is_integer
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import (
    DraftRequest,
    DraftRows,
    DraftSizes,
    DraftTarget,
    SpecSettings,
    VerifyChoice,
    VerifyOutcome,
    VerifyRows,
)
from graphs.inputs import ForwardInputs
from graphs.kernels.kernel_set import SampleKernels
from graphs.rows import DEVICE_DRAFT
from spec.proposer import Proposer, ProposerMemory
from spec.registry import find_proposer
from spec.rejection import choose_argmax, choose_sampled, choose_synthetic


def build_runtime(settings: SpecSettings, model: ModelConfig) -> SpecRunner:
    """The runtime of `settings` for a target.

    Raises:
        ValueError: an unknown algorithm, or a setting that it cannot serve; names the flag.
    """
    return SpecRunner(settings, model, find_proposer(settings.algorithm))


class SpecRunner:
    """One draft method at work, as `SpecRuntime` says, whose threads and order these are."""

    def __init__(
        self, settings: SpecSettings, model: ModelConfig, proposer_class: type[Proposer]
    ) -> None:
        """Ask the method for its memory, then build it.

        Raises:
            ValueError: what it declares is no memory; names the method. What the method raises
                goes through.
        """
        self._settings = settings
        self._vocab_size = model.vocab_size
        self._memory = _declared_memory(settings, model, proposer_class)
        self._proposer = proposer_class(settings, model)

    @property
    def num_drafts(self) -> int:
        """k: rows of a request in a verify step, less one."""
        return self._settings.num_drafts

    @property
    def memory(self) -> DraftMemory:
        """What the method declares, and the rows that it makes the target score."""
        return self._memory

    @property
    def wants_features(self) -> bool:
        """As the proposer declares."""
        return self._proposer.wants_features

    @property
    def drafts_on_device(self) -> bool:
        """As the proposer declares."""
        return self._proposer.drafts_on_device

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        """Once, before the target's steps are captured; see `Proposer.capture`."""
        self._proposer.capture(target, sizes)

    def draft(self, rows: DraftRows) -> Tensor:
        """At the start of a verify step; see `Proposer.draft`."""
        return self._proposer.draft(rows)

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        """Within prefill and verify steps; see `Proposer.take_features`."""
        self._proposer.take_features(hidden, inputs, slots)

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None:
        """At the end of a verify step; see `Proposer.take_choice`."""
        self._proposer.take_choice(slots, choice)

    def finish_prefill(self, request: DraftRequest) -> None:
        """The request decodes from now on; see `Proposer.finish_prefill`."""
        self._proposer.finish_prefill(request)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Up to max_drafts drafts for each request, all of them tokens of the vocabulary.

        Raises:
            ValueError: the proposer returned something else than lists of integers, one for each
                request; names it. What the proposer itself raises goes through.
        """
        if self._proposer.drafts_on_device:
            return [[DEVICE_DRAFT] * min(r.max_drafts, self.num_drafts) for r in requests]
        proposed = self._proposer.propose(requests)
        if not isinstance(proposed, list) or len(proposed) != len(requests):
            raise self._mistake(f"{_describe(proposed)} for {len(requests)} requests")
        return [
            self._usable(drafts, min(request.max_drafts, self.num_drafts))
            for request, drafts in zip(requests, proposed, strict=True)
        ]

    def choose(
        self,
        logits: Tensor,
        rows: VerifyRows,
        table: SamplingTable,
        plan: SamplingPlan,
        kernels: SampleKernels,
    ) -> VerifyChoice:
        """Sample every row and accept drafts, by the kind of drafts; see `SpecRuntime`."""
        mean, probs = self._settings.synthetic_acceptance, self._proposer.draft_probs
        if mean is not None:
            return choose_synthetic(logits, rows, table, plan, kernels, mean)
        if probs is None:
            return choose_argmax(logits, rows, table, plan, kernels)
        return choose_sampled(logits, rows, table, plan, kernels, probs[: len(rows.token_ids)])

    def finish_step(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """After a verify step was drained: the method learns from it."""
        self._proposer.finish_verify(outcomes)

    def release(self, request_id: str) -> None:
        """The request is over, or was preempted."""
        self._proposer.release(request_id)

    def _usable(self, drafts: object, max_drafts: int) -> list[int]:
        """The first `max_drafts`, without what follows a token that the target cannot embed."""
        if not isinstance(drafts, list):
            raise self._mistake(f"{_describe(drafts)} as the drafts of one request")
        usable = []
        for draft in drafts[:max_drafts]:
            try:
                token_id = index(draft)
            except TypeError as error:
                raise self._mistake(f"{_describe(draft)} as a token id") from error
            if not 0 <= token_id < self._vocab_size:
                break
            usable.append(token_id)
        return usable

    def _mistake(self, returned: str) -> ValueError:
        return ValueError(
            f"--speculative-algorithm {self._settings.algorithm}: propose of "
            f"{type(self._proposer).__qualname__} returned {returned}; it must return one list of "
            f"token ids for each request"
        )


def _declared_memory(
    settings: SpecSettings, model: ModelConfig, proposer_class: type[Proposer]
) -> DraftMemory:
    """What the method declares, checked, and the rows that its drafts make."""
    declared: object = proposer_class.memory(settings, model)
    if not isinstance(declared, ProposerMemory) or not all(
        is_integer(size) and size >= 0 for size in asdict(declared).values()
    ):
        what = declared if isinstance(declared, ProposerMemory) else _describe(declared)
        raise ValueError(
            f"--speculative-algorithm {settings.algorithm}: memory of "
            f"{proposer_class.__qualname__} returned {what}; it must return a ProposerMemory of "
            f"whole numbers, 0 or more"
        )
    return DraftMemory(**asdict(declared), rows_per_request=settings.num_drafts + 1)


def _describe(value: object) -> str:
    """A value of any size, in few words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
