"""One captured CUDA graph and the addresses that it is bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

Outputs = TypeVar("Outputs")


class CapturedGraph(Generic[Outputs]):
    """A run of `run`, captured into `pool`, that repeats with what `inputs` then hold.

    The graph reads and writes the addresses that its tensors had at capture. `bound` are those
    that it neither makes nor owns, such as pools and tables: a replay after one of them has moved
    is refused. The outputs belong to the graph, and the next replay of any graph of the same pool
    may overwrite them: copy them on the same stream before that.
    """

    def __init__(
        self,
        run: Callable[[], Outputs],
        inputs: Sequence[Tensor],
        bound: Sequence[Tensor],
        pool: tuple[int, int],
    ) -> None:
        self._bound = (*inputs, *bound)
        self._addresses = [tensor.data_ptr() for tensor in self._bound]
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would also collect garbage and empty the cache, at every capture.
        self._graph.capture_begin(pool=pool)  # type: ignore[arg-type]  # torch's NewType is private
        try:
            self._outputs = run()
        finally:
            self._graph.capture_end()

    def replay(self) -> Outputs:
        """Repeat the run on the current stream. Raises RuntimeError where a tensor has moved."""
        for tensor, address in zip(self._bound, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that a captured graph uses has moved"
                )
        self._graph.replay()
        return self._outputs
