"""The steps of one kind at every padded batch size: captured graphs, or compiled calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from graphs.capture import CapturedGraph
from graphs.inputs import Kind
from graphs.rows import Row, RowField, pack_rows
from graphs.sizes import padded_size

Variant = TypeVar("Variant")
Outputs = TypeVar("Outputs")


class GraphFamily(Generic[Variant, Outputs]):
    """Runs steps of `kind` with `rows_per_request` rows for each request.

    `step(rows, variant)` gets the packed rows [fields, size * rows_per_request] int64 on the
    device (see `graphs.rows`) and computes the step; a variant names a graph of its own, such as
    greedy or sampled. Batches are padded up to the next of `sizes` with padding rows. Everything
    runs in inference mode: compiled code is bound to how its tensors were made.

    With `pool` (CUDA): `capture` captures each size and variant into that memory pool, largest
    first, and a step is one copy and one graph launch. Without: the same calls, uncaptured.
    """

    def __init__(
        self,
        kind: Kind,
        rows_per_request: int,
        sizes: Sequence[int],
        variants: Sequence[Variant],
        step: Callable[[Tensor, Variant], Outputs],
        *,
        device: torch.device,
        bound: Sequence[Tensor] = (),
        pool: tuple[int, int] | None = None,
    ) -> None:
        self.kind, self.rows_per_request = kind, rows_per_request
        self.sizes, self.variants = tuple(sizes), tuple(variants)
        self._step, self._device, self._bound, self._pool = step, device, tuple(bound), pool
        self._static_rows: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, Variant], CapturedGraph[Outputs]] = {}

    @property
    def num_captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @torch.inference_mode()
    def compile(self) -> None:
        """Run every size and variant once on padding rows, so that nothing is left to compile."""
        for size in self.sizes:
            for variant in self.variants:
                self.run_padding(size, variant)

    @torch.inference_mode()
    def run_padding(self, size: int, variant: Variant, position: int = 0) -> None:
        """Run padding rows, uncaptured, as if they were at `position` of a sequence."""
        rows = self._padding_rows(size)
        rows[RowField.POSITION] = position
        self._step(rows, variant)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every size and variant, largest first; nothing without a pool.

        Call it after `compile`, on the thread and stream that will run the steps, with no other
        work on the device.
        """
        if self._pool is None:
            return
        torch.cuda.synchronize()
        for size in reversed(self.sizes):
            rows = self._static_rows[size] = self._padding_rows(size)
            for variant in self.variants:
                self._graphs[size, variant] = CapturedGraph(
                    lambda rows=rows, variant=variant: self._step(rows, variant),  # type: ignore[misc]
                    [rows],
                    self._bound,
                    self._pool,
                )

    @torch.inference_mode()
    def run(self, rows: Sequence[Row], variant: Variant) -> Outputs:
        """One step of at least one request; rows of a request are contiguous and in order.

        Outputs are of the padded size. Captured ones belong to the graph, and the next step of
        any family may overwrite them.
        """
        assert len(rows) % self.rows_per_request == 0
        size = padded_size(self.sizes, len(rows) // self.rows_per_request)
        is_cuda = self._device.type == "cuda"
        packed = pack_rows(rows, size * self.rows_per_request, is_pinned=is_cuda)
        if self._pool is None:
            return self._step(packed.to(self._device, non_blocking=True), variant)
        self._static_rows[size].copy_(packed, non_blocking=True)
        return self._graphs[size, variant].replay()

    def _padding_rows(self, size: int) -> Tensor:
        shape = len(RowField), size * self.rows_per_request
        return torch.zeros(shape, dtype=torch.int64, device=self._device)
