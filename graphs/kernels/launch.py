"""The one way our Triton kernels are launched from inside a `triton_op`."""

from __future__ import annotations

from typing import Any

from torch.library import wrap_triton
from triton.runtime.interpreter import InterpretedFunction


def launch(kernel: Any) -> Any:  # noqa: ANN401  (Triton has no common type for a launchable)
    """`kernel`, ready for `launch(kernel)[grid](...)`, visible to torch.compile.

    Under TRITON_INTERPRET=1 kernels run as Python on CPU tensors, which `wrap_triton` refuses.
    """
    return kernel if isinstance(kernel, InterpretedFunction) else wrap_triton(kernel)
