"""What the engine knows of speculation: one Protocol, the data that crosses it, loading by name.

The engine schedules verify steps, runs them and commits what they accept. Which drafts a step
scores and which of them it accepts, the runtime decides. Without a speculative algorithm
nothing in `spec/` is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from engine.attention.protocol import MAX_VERIFY_ROWS, AttentionBackend
from engine.memory import DraftMemory
from engine.model_config import ModelConfig
from engine.models.hybrid import ForwardFunctions, HybridModel
from engine.request import is_integer
from engine.sampler import Sampled, SamplingPlan
from engine.sampling_rows import SamplingTable
from graphs.inputs import ForwardInputs
from graphs.kernels.kernel_set import SampleKernels

RUNTIME = "spec.runner"
MAX_NUM_DRAFTS = MAX_VERIFY_ROWS - 1
DEFAULT_MIN_MATCH_LEN = 1
DEFAULT_MAX_MATCH_LEN = 8
MAX_MATCH_LEN = 64
NUM_DRAFTS_FLAG = "--speculative-num-steps"
MIN_MATCH_FLAG = "--speculative-ngram-min-match-window-size"
MAX_MATCH_FLAG = "--speculative-ngram-max-match-window-size"


@dataclass(frozen=True)
class SpecSettings:
    """What the user asked of speculation, checked here for all who make it.

    `algorithm`: a name of `spec.registry`, or `module:Class` of a third party's proposer.
    `num_drafts`: k, drafts of a request in one step. `synthetic_acceptance`: for speed tests,
    the mean number of tokens that a step commits, in place of comparing drafts; None compares.
    `min_match_len`, `max_match_len`: of `ngram` alone, tokens in the matches that it looks for.

    Raises:
        ValueError: a value is out of range; names the flag and what is accepted.
    """

    algorithm: str
    num_drafts: int
    draft_model_path: str | None = None
    synthetic_acceptance: float | None = None
    min_match_len: int = DEFAULT_MIN_MATCH_LEN
    max_match_len: int = DEFAULT_MAX_MATCH_LEN

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str) or not self.algorithm:
            raise ValueError(
                f"--speculative-algorithm must be the name of a draft method, got "
                f"{self.algorithm!r}"
            )
        _require_count(NUM_DRAFTS_FLAG, self.num_drafts, MAX_NUM_DRAFTS)
        length, most = self.synthetic_acceptance, self.num_drafts + 1
        is_length = isinstance(length, (int, float))
        if length is not None and not (is_length and 1.0 <= length <= most):
            raise ValueError(
                f"--synthetic-acceptance must be in [1, {most}] with {NUM_DRAFTS_FLAG} "
                f"{self.num_drafts}, got {length!r}"
            )
        longest = self.max_match_len
        _require_count(MAX_MATCH_FLAG, longest, MAX_MATCH_LEN)
        given = f" with {MAX_MATCH_FLAG} {longest}"
        _require_count(MIN_MATCH_FLAG, self.min_match_len, longest, given)


@dataclass(frozen=True)
class DraftSizes:
    """What a draft method may size its device memory by.

    `batch_sizes`: numbers of requests that steps are padded to. `num_pages` of `page_size` tokens
    are the target's KV cache, `num_slots` is how many requests run together; index 0 of pages and
    of slots is padding and comes on top. Running requests never have more tokens than the pages
    hold, and declared bytes per token are planned for all of them, padding page included.
    """

    batch_sizes: Sequence[int]
    num_pages: int
    page_size: int
    num_slots: int


@dataclass(frozen=True)
class DraftRequest:
    """A request whose next tokens may be drafted; the lists are the engine's own, to read.

    The last of prompt and output is the pending token: chosen, and not yet in the caches. A step
    can commit at most `max_drafts` drafts: further ones would be beyond the request's length.
    `finish_prefill` is told 0, as nothing is asked there.
    """

    request_id: str
    slot: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    max_drafts: int


@dataclass(frozen=True)
class VerifyOutcome:
    """What a drained step did for one request: its drafts, and the tokens that it got.

    None where the request had ended before the drain; what a stop cuts off is not among them.
    Drafts made on the device are DEVICE_DRAFT here.
    """

    request_id: str
    draft_ids: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True)
class DraftTarget:
    """What a draft method may use of the target, to read.

    `model` has the embedding, the head and the kernels, `backend` attends, `forward` are the
    regions of a forward, compiled or as they are. `model_path` is the target's folder.
    """

    model: HybridModel
    backend: AttentionBackend
    forward: ForwardFunctions
    model_path: Path
    load_format: str
    dtype: torch.dtype
    device: torch.device


class DraftRows(NamedTuple):
    """The requests of a verify step that wants drafts, on the device.

    slots, positions, token_ids: [R] int64 of their pending tokens. kv_slots: [R, k + 1] int64 of
    the rows to be verified; page_table: [R, P] int64, which has their pages.
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    kv_slots: Tensor
    page_table: Tensor


class VerifyRows(NamedTuple):
    """The rows of a verify step on the device: R requests of k + 1 rows each, in order.

    token_ids: [R, k + 1] int64, the pending token, then drafts, NO_DRAFT where there is none.
    slots: [R * (k + 1)] int64, each row's slot, 0 in rows of padding. output_indexes:
    [R * (k + 1)] int64, index of the output token that the row chooses.
    """

    token_ids: Tensor
    slots: Tensor
    output_indexes: Tensor


class VerifyChoice(NamedTuple):
    """What a verify step chose, on the device.

    sampled: of each row; only those of the first num_committed rows of a request mean anything.
    num_committed: [R] int64 in 1..k + 1, accepted drafts and one token more. The run ends with
    the first token that ends the request by itself (EOS, a stop token) or with a bad row.
    """

    sampled: Sampled
    num_committed: Tensor


class SpecRuntime(Protocol):
    """One draft method at work.

    `choose`, `draft`, `take_features` and `take_choice` run inside the captured step. The rest is
    on the host and called in turns, from the thread that launches steps (`capture`, `propose`) and
    from the event loop (the others: brief, or all requests wait), never at the
    same time. What one of them raises ends the engine, after which none is called.
    """

    @property
    def num_drafts(self) -> int:
        """k: rows of a request in a verify step, less one."""
        ...

    @property
    def memory(self) -> DraftMemory:
        """What drafting takes beside the target: known before anything is allocated."""
        ...

    @property
    def wants_features(self) -> bool:
        """Whether `take_features` is to be called."""
        ...

    @property
    def drafts_on_device(self) -> bool:
        """Whether `draft` and `take_choice` are to be called, within each verify step.

        `propose` then says how many drafts there will be: lists of DEVICE_DRAFT.
        """
        ...

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        """Once, on the launching thread, before the target's steps are compiled and captured."""
        ...

    def draft(self, rows: DraftRows) -> Tensor:
        """Drafts [R, k] int64, at the start of a verify step."""
        ...

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        """What the target computed for the rows of a prefill or verify step, within the step.

        hidden: [T, hidden_size] after the final norm. inputs: of the target's forward. slots: [T]
        int64; rows of slot 0 are padding. Rows that the step then rejects are among them.
        """
        ...

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None:
        """What a verify step chose for its requests' slots [R], at its end."""
        ...

    def finish_prefill(self, request: DraftRequest) -> None:
        """The request decodes from now on; called when its last prefill was drained."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Up to max_drafts drafts for each request, fewer or none where it knows of none."""
        ...

    def choose(
        self,
        logits: Tensor,
        rows: VerifyRows,
        table: SamplingTable,
        plan: SamplingPlan,
        kernels: SampleKernels,
    ) -> VerifyChoice:
        """Sample every row of logits [R * (k + 1), vocab] as decode would, and accept drafts.

        Static shapes, nothing read back: it is captured.
        """
        ...

    def finish_step(self, outcomes: Sequence[VerifyOutcome]) -> None:
        """After a verify step was drained: what became of the drafts."""
        ...

    def release(self, request_id: str) -> None:
        """The request is over, or was preempted: forget what is kept for it.

        After a preemption the same id comes back, with its outputs, at `finish_prefill`.
        """
        ...


class SpecRuntimeModule(Protocol):
    """What the module RUNTIME offers."""

    def build_runtime(self, settings: SpecSettings, model: ModelConfig) -> SpecRuntime:
        """The runtime of `settings` for a target.

        Raises:
            ValueError: an unknown algorithm, or a setting that it cannot serve; names the flag.
        """
        ...


def _require_count(flag: str, value: int, most: int, given: str = "") -> None:
    if not is_integer(value) or not 1 <= value <= most:
        raise ValueError(f"{flag} must be in [1, {most}]{given}, got {value!r}")


def load_spec_runtime(settings: SpecSettings, model: ModelConfig) -> SpecRuntime:
    """Import `spec/` and build the runtime.

    Raises:
        ValueError: as `build_runtime`.
    """
    module = cast(SpecRuntimeModule, importlib.import_module(RUNTIME))
    return module.build_runtime(settings, model)
