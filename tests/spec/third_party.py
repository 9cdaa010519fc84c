"""Draft methods as somebody else would write them, loaded by `tests.spec.third_party:Class`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.model_config import ModelConfig
from engine.spec_protocol import (
    DraftRequest,
    DraftRows,
    DraftSizes,
    DraftTarget,
    SpecSettings,
    VerifyChoice,
    VerifyOutcome,
)
from graphs.inputs import ForwardInputs
from spec.proposer import Proposer, ProposerMemory

DRAFTS = torch.zeros(1, 3, dtype=torch.int64)


class SmallestProposer(Proposer):
    """No more than a draft method must have."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[1, 2, 3] for _ in requests]


class RecordingProposer(Proposer):
    """Overrides everything, and keeps what it was called with."""

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        super().__init__(settings, model)
        self.calls: list[tuple[object, ...]] = []
        recorded.append(self)

    @classmethod
    def memory(cls, settings: SpecSettings, model: ModelConfig) -> ProposerMemory:
        return ProposerMemory(fixed_bytes=1000 * settings.num_drafts, kv_per_token=model.head_dim)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.calls.append(("propose", requests))
        return [[7] for _ in requests]

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        self.calls.append(("capture", target, sizes))

    def draft(self, rows: DraftRows) -> Tensor:
        self.calls.append(("draft", rows))
        return DRAFTS

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        self.calls.append(("take_features", hidden, inputs, slots))

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None:
        self.calls.append(("take_choice", slots, choice))

    def finish_prefill(self, request: DraftRequest) -> None:
        self.calls.append(("finish_prefill", request))

    def finish_verify(self, outcomes: Sequence[VerifyOutcome]) -> None:
        self.calls.append(("finish_verify", outcomes))

    def release(self, request_id: str) -> None:
        self.calls.append(("release", request_id))


recorded: list[RecordingProposer] = []


class AnswerProposer(Proposer):
    """Returns `answer`, whatever a test has put there; raises it if it is an exception."""

    answer: object = None

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


class MemoryProposer(SmallestProposer):
    """Declares `answer`, whatever a test has put there."""

    answer: object = None

    @classmethod
    def memory(cls, settings: SpecSettings, model: ModelConfig) -> ProposerMemory:
        return cls.answer  # type: ignore[return-value]


class ForgetfulProposer(Proposer):
    """Has everything but `propose`."""


class Unrelated:
    """Has `propose`, and is no proposer."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]


NUMBER = 3
