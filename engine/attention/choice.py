"""Which attention backends a plan uses: one, or one for prefills and one for decode steps."""

from __future__ import annotations

import logging

from torch import Tensor

from engine.attention.paged import PAGED_BACKENDS
from engine.attention.protocol import AttentionBackend, HeadParameters, RowCapabilities
from engine.cache.pools import KvLayer
from graphs.inputs import ForwardInputs, Kind

logger = logging.getLogger(__name__)


class SplitAttention:
    """An `AttentionBackend` that leaves prefills to one backend and all else to another."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def capabilities(self) -> RowCapabilities:
        """Of decode and verify steps: only those have several rows or are captured."""
        return self.decode.capabilities

    def attend(
        self, qkv: Tensor, heads: HeadParameters, kv: KvLayer, inputs: ForwardInputs
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        backend = self.prefill if inputs.kind is Kind.PREFILL else self.decode
        return backend.attend(qkv, heads, kv, inputs)


def parse_backends(wanted: str) -> tuple[str, str]:
    """Names of the prefill and the decode backend in `X` or `X,Y`; auto stays auto.

    Raises:
        ValueError: names the flag and what is accepted.
    """
    names = wanted.split(",")
    is_known = all(name in PAGED_BACKENDS for name in names) or wanted == "auto"
    if not is_known or len(names) > 2:
        known = ", ".join(PAGED_BACKENDS)
        raise ValueError(
            f"--attention-backend must be auto, one of {known}, or two of them as prefill,decode; "
            f"got {wanted!r}"
        )
    return names[0], names[-1]


def choose_backends(
    wanted: str, *, is_cuda: bool, rows_per_request: int, may_capture: bool
) -> tuple[str, str]:
    """The prefill and the decode backend of a plan.

    With several rows a request, steps on CUDA are captured unless `may_capture` is false: of two
    backends of which only the first can do that, it serves both.

    Raises:
        ValueError: a backend cannot run here; names the flag and what is accepted.
    """
    prefill, decode = parse_backends(wanted)
    if not is_cuda and "triton" in (prefill, decode):
        raise ValueError("--attention-backend triton needs a CUDA device; use torch or auto")
    if wanted == "auto":
        return ("triton", "triton") if is_cuda else ("torch", "torch")
    if rows_per_request == 1 or not (is_cuda and may_capture):
        return prefill, decode
    if can_capture(decode, rows_per_request):
        return prefill, decode
    if not can_capture(prefill, rows_per_request):
        raise ValueError(
            f"--attention-backend {wanted} cannot run {rows_per_request} rows of a request in a "
            f"CUDA graph, as --speculative-algorithm wants; use triton, or --cuda-graphs off"
        )
    logger.info(
        "--attention-backend %s becomes %s: %s cannot run %d rows of a request in a CUDA graph",
        wanted, prefill, decode, rows_per_request,
    )  # fmt: skip
    return prefill, prefill


def can_capture(name: str, rows_per_request: int) -> bool:
    """Whether a backend runs that many rows of a request in a CUDA graph."""
    capabilities = PAGED_BACKENDS[name].capabilities
    return capabilities.can_capture and capabilities.max_rows_per_request >= rows_per_request


def build_backend(prefill: str, decode: str) -> AttentionBackend:
    """The backend of a plan."""
    if prefill == decode:
        return PAGED_BACKENDS[prefill]
    return SplitAttention(PAGED_BACKENDS[prefill], PAGED_BACKENDS[decode])
