"""The contract between a model and the loader: which checkpoint tensor goes where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightSlot:
    """The destination of one checkpoint tensor.

    `shape` is the tensor's shape in the file. `destination` is a view into a parameter of the
    model, on the model's device and in the model's dtype, possibly a slice of a fused one.
    `arrange` turns the loaded tensor into the destination's layout (None: same layout).
    """

    destination: Tensor
    shape: tuple[int, ...]
    arrange: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class WeightPlan:
    """Everything a checkpoint of one model must hold.

    `slots`: tensor name in the file -> destination; each must be present with its shape.
    `skipped_prefixes`: names under these are known and not loaded (vision towers).
    `kept_prefixes`: names under these belong to later features (`mtp.`) and are not an error.
    `tied`: (absent-or-equal name, name it must equal) pairs, such as lm_head and embeddings.
    """

    slots: dict[str, WeightSlot]
    skipped_prefixes: tuple[str, ...] = ()
    kept_prefixes: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
