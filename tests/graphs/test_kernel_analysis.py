"""E5: torch works out what a kernel reads and writes once for each kind of launch.

Oracle: how often torch's own function is called, by a stand-in that counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.runtime.autotuner import Autotuner

from graphs.compile import kernels_analysed_once


class Analysis:
    """Stands in for the IR: one object for each time that it is made."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Analysis]:
    """Everything that torch's functions have made and read."""
    modules: list[Analysis] = []

    def generate(kernel: object, kwargs: dict[str, Any], tma: object) -> tuple[object, list[str]]:
        kwargs.clear()  # torch's takes options out of what it is given
        modules.append(Analysis())
        return modules[-1], ["x"]

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", generate)
    monkeypatch.setattr(triton_kernel_wrap, "ttir_to_functions", lambda module: [module])
    return modules


def kernel(x: object) -> None:
    """A kernel that is never run."""


def analyse(fn: object = kernel, tma: object = None, **kwargs: object) -> tuple[object, object]:
    """What torch does for each launch that it meets."""
    module, _ = triton_kernel_wrap.generate_ttir(fn, dict(kwargs), tma or {})  # type: ignore[arg-type]
    return module, triton_kernel_wrap.ttir_to_functions(module)


def test_equal_launches_share_an_analysis(made: list[Analysis]) -> None:
    """E5: other tensors of the dtype, other symbols, other order of arguments."""
    env = ShapeEnv()
    rows, pages = env.create_unbacked_symint(), env.create_unbacked_symint()
    with kernels_analysed_once():
        first = analyse(x=torch.zeros(3), n=rows, BLOCK=16)
        again = analyse(x=torch.ones(5), n=pages, BLOCK=16)
        turned = analyse(BLOCK=16, n=rows, x=torch.zeros(3))
    assert len(made) == 1
    assert first[0] is again[0] is turned[0] and first[1] is again[1] is turned[1]


def test_what_changes_the_code_is_analysed_anew(made: list[Analysis]) -> None:
    """E5: the kernel, a dtype, a constant, its type, a size that is known, a tensor descriptor."""

    def other(x: object) -> None:
        """Another kernel."""

    x, rows = torch.zeros(3), ShapeEnv().create_unbacked_symint()
    with kernels_analysed_once():
        analyse(x=x, n=rows, BLOCK=16)
        analyse(other, x=x, n=rows, BLOCK=16)
        analyse(x=x.half(), n=rows, BLOCK=16)
        analyse(x=x, n=rows, BLOCK=32)
        analyse(x=x, n=16, BLOCK=16)
        analyse(x=x, n=1, BLOCK=16)
        analyse(x=x, n=True, BLOCK=16)
        for _ in range(2):  # never shared
            analyse(tma={"x": 1}, x=x, n=rows, BLOCK=16)
    assert len(made) == 9


def test_launches_with_options_share_theirs(made: list[Analysis]) -> None:
    """E5: torch wraps a kernel anew for each launch with warps or stages given."""
    wrapped = []
    for _ in range(2):
        wrapper = Autotuner.__new__(Autotuner)
        wrapper.fn, wrapper.configs = kernel, []
        wrapped.append(wrapper)
    with kernels_analysed_once():
        for wrapper in wrapped:
            analyse(wrapper, x=torch.zeros(3), n=4)
        analyse(x=torch.zeros(3), n=4)
    assert len(made) == 1


def test_torch_has_its_functions_back(made: list[Analysis]) -> None:
    """E5: after an error too."""
    before = triton_kernel_wrap.generate_ttir, triton_kernel_wrap.ttir_to_functions
    with pytest.raises(RuntimeError), kernels_analysed_once():
        assert triton_kernel_wrap.generate_ttir is not before[0]
        raise RuntimeError
    assert (triton_kernel_wrap.generate_ttir, triton_kernel_wrap.ttir_to_functions) == before
