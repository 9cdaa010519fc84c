"""Which implementation of the kernels a model is built with."""

from __future__ import annotations

from enum import StrEnum


class KernelBackend(StrEnum):
    """TORCH: the references, anywhere torch runs. TRITON: our kernels, on CUDA.

    (Under TRITON_INTERPRET=1 the Triton kernels also run on the CPU, slowly; tests do that.)
    """

    TORCH = "torch"
    TRITON = "triton"
