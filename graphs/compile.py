"""How decoder blocks are compiled: one compilation per block kind and shape family."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def compile_block(run_block: F, *, is_enabled: bool) -> F:
    """`run_block` compiled as a whole, without graph breaks; as it is when not enabled.

    Blocks of one kind share a compilation, since parameters and pools enter as inputs. Shapes
    are compiled as they come: the first size as it is, others once with dynamic sizes.
    """
    if not is_enabled:
        return run_block
    return torch.compile(run_block, fullgraph=True, dynamic=None)
