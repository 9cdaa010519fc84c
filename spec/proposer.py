"""What a draft method is: one method to write, hooks to override, bytes to declare.

Knows nothing of scheduling, sampling or accepting; `spec/runner.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class ProposerMemory:
    """Device bytes that a draft method takes: once, and for each token of the target's KV cache.

    The others count values of the model's dtype: once, for each token, for each running request.
    """

    fixed_bytes: int = 0
    kv_per_token: int = 0
    num_weights: int = 0
    kv_values_per_token: int = 0
    values_per_slot: int = 0


class Proposer:
    """A draft method. Subclass it and write `propose`; every other method has a default.

    The engine has one proposer, built before memory is planned. `capture` comes next, once, and
    then for each request `finish_prefill`, any number of `propose` and `finish_verify`, and
    `release`. All but `take_features` run on the host: `capture` and `propose` on the thread that
    launches steps, the others on the event loop (be brief there: all requests wait), never two at
    the same time. So a proposer needs no locks. What any of them raises ends the engine, and none
    is called after that.

    `draft_probs`: None says that a draft is what the method holds likeliest (argmax drafts),
    which are accepted where the target's own choice is the same. A method that draws its drafts
    sets it in `capture`: float32 [requests, k, vocab] on the device, whose row i is what the
    drafts of the i-th request of the last `propose` were drawn from. Steps may be captured with
    its address, so it is written in place.
    """

    draft_probs: Tensor | None = None

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        """Keep what the user asked for and the target's sizes; allocate nothing on the device.

        A subclass raises ValueError for settings that it cannot serve, and names the flag.
        """
        self.settings = settings
        self.model = model

    #: Whether the target's hidden states go to `take_features`.
    wants_features: bool = False

    @classmethod
    def memory(cls, settings: SpecSettings, model: ModelConfig) -> ProposerMemory:
        """Device bytes, for the memory plan; called before the proposer is built.

        Whole numbers, none below 0; anything else is refused at start-up.
        """
        return ProposerMemory()

    #: Whether drafts are made by `draft`, within the step, and not by `propose`.
    drafts_on_device: bool = False

    def draft(self, rows: DraftRows) -> Tensor:
        """Drafts [R, k] int64 of a verify step, at its start and captured with it.

        Only of methods with `drafts_on_device`; device work of static shapes, nothing read back.
        """
        raise NotImplementedError

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None:
        """What the step chose, and how many rows of each request [R] it commits.

        Only for methods with `drafts_on_device`; after `take_features` of the same step.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for each request, in order: the tokens that may follow its pending token.

        Called before each verify step. At most `max_drafts` of a list are used, and none from
        the first one on that is no token of the vocabulary; an empty list drafts nothing. The
        lists in `requests` grow as tokens are committed, and only then: read them, keep no copy
        that is not released.
        """
        raise NotImplementedError

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        """Load weights, allocate device memory, and capture graphs of the method's own.

        Called once, before the target's steps are compiled and captured.
        """

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        """What the target computed for the rows of a prefill or verify step.

        Part of the step and captured with it: device work of static shapes, nothing read back.
        hidden: [T, hidden_size], after the final norm, valid within this call. inputs: what the
        target was given. slots: [T] int64 of each row; rows of slot 0 are padding. Rows of drafts
        that the step then rejects are among them.
        """

    def finish_prefill(self, request: DraftRequest) -> None:
        """The prompt is in the caches. After a preemption the outputs so far are in them too.

        Called when the step is drained, before the request's first `propose`.
        """

    def finish_verify(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """A verify step was drained: which drafts it scored and which tokens it committed.

        Called before the requests' next `propose`, and before `release` of those that ended.
        """

    def release(self, request_id: str) -> None:
        """The request ended, was aborted or was preempted: drop everything that is kept for it.

        A request may be released without ever having been proposed for. A preempted request comes
        back under the same id, with its outputs, and starts at `finish_prefill`.
        """
