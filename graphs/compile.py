"""How the regions of a forward are compiled: once per block kind and shape family."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch._dynamo.utils import counters

Run = TypeVar("Run", bound=Callable[..., object])

# Decode alone, decode together, prefill; each first static, then dynamic, per block kind. On
# CUDA each range of rows that has a kernel of its own adds one.
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


def count_compilations() -> int:
    """How many graphs torch.compile has made in this process so far."""
    return int(counters["stats"]["unique_graphs"])
