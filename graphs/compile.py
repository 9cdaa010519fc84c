"""How the regions of a forward are compiled: once per block kind and shape family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import sympy
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.ir import TensorBox
from triton.runtime.autotuner import Autotuner

Run = TypeVar("Run", bound=Callable[..., object])

# Decode alone, decode together, prefill, per block kind; on CUDA each range of rows that has a
# kernel of its own.
MAX_COMPILATIONS_PER_BLOCK_KIND = 32


def compile_whole(run: Run) -> Run:
    """`run` compiled as a whole, without graph breaks, when it is first called.

    Decoder blocks of one kind share a compilation, since parameters and pools enter as inputs.
    Shapes are compiled as they come: the first size as it is, others once with dynamic sizes.
    """
    return cast(Run, torch.compile(run, fullgraph=True))


def allow_compilations(num_block_kinds: int) -> None:
    """Let the calling thread compile all planned shapes of that many block kinds.

    Call it first on the thread that runs compiled code: Dynamo keeps its limit per thread, and
    counts every compilation of the shared code against it, earlier engines' included.
    """
    torch._dynamo.config.recompile_limit = count_compilations() + (
        MAX_COMPILATIONS_PER_BLOCK_KIND * num_block_kinds
    )
    # Which sizes earlier processes met must not decide which graphs this one makes: a second
    # start would compile others than those that the first has kept.
    torch._dynamo.config.automatic_dynamic_local_pgo = False


def count_compilations() -> int:
    """How many graphs torch.compile has made in this process so far."""
    return int(counters["stats"]["unique_graphs"])


@contextmanager
def kernels_analysed_once() -> Iterator[None]:
    """While this is open, torch.compile works out only once what a Triton kernel reads and writes.

    For every launch in a graph torch makes the kernel's IR and reads it, in each of its passes
    anew: half the time of a cold start. Both depend on the kernel, the dtypes of its tensors and
    its other arguments alone. See ADR 16; not to be opened in two threads at once.
    """
    generate, read = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.ttir_to_functions
    made: dict[tuple[object, ...], tuple[Any, list[str]]] = {}
    functions: dict[int, Any] = {}  # by the id of a module that `made` keeps alive

    def generate_once(kernel: Any, kwargs: dict[str, Any], tma: Any) -> tuple[Any, list[str]]:  # noqa: ANN401
        if tma:
            return generate(kernel, kwargs, tma)
        if isinstance(kernel, Autotuner):  # torch makes a new one of every launch with options
            kwargs = {**kwargs, **(kernel.configs[0].kwargs if kernel.configs else {})}
            kernel = kernel.fn
        described = ((name, *describe_argument(value)) for name, value in sorted(kwargs.items()))
        key = (kernel, *described)
        if key not in made:
            made[key] = generate(kernel, dict(kwargs), tma)
            functions[id(made[key][0])] = read(made[key][0])
        return made[key]

    def read_once(module: Any) -> Any:  # noqa: ANN401
        return functions[id(module)] if id(module) in functions else read(module)

    triton_kernel_wrap.generate_ttir = generate_once  # type: ignore[assignment]
    triton_kernel_wrap.ttir_to_functions = read_once  # type: ignore[assignment]
    try:
        yield
    finally:
        triton_kernel_wrap.generate_ttir = generate
        triton_kernel_wrap.ttir_to_functions = read


def describe_argument(value: object) -> tuple[object, ...]:
    """All that a kernel's IR takes from an argument: a tensor's dtype, that a size is symbolic."""
    if isinstance(value, (Tensor, TensorBox)):
        return "tensor", value.dtype
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Basic)):
        return ("symbol",)
    return type(value), value
