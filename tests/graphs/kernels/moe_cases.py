"""Random mixture-of-experts layers, and their fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MoeSizes:
    """hidden, experts, inner dims of a routed and of the shared expert, experts per row."""

    hidden: int
    experts: int
    inner: int
    shared: int
    top_k: int


TINY = MoeSizes(32, 4, 16, 16, 2)
UNEVEN = MoeSizes(40, 5, 12, 20, 2)
TOP_1 = MoeSizes(36, 5, 12, 20, 1)
MANY_EXPERTS = MoeSizes(48, 70, 16, 8, 10)
GEOMETRIES = {
    "35B-A3B": MoeSizes(2048, 256, 512, 512, 8),
    "Next-80B-A3B": MoeSizes(2048, 512, 512, 512, 10),
    "2560-640": MoeSizes(2560, 512, 640, 640, 10),
}


@dataclass(frozen=True)
class MoeLayer:
    """Weights in the order of the op's arguments, and rows that spread over the experts."""

    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor
    shared_down: Tensor
    shared_gate: Tensor

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return (
            self.router,
            self.gate_up,
            self.down,
            self.shared_gate_up,
            self.shared_down,
            self.shared_gate,
        )


def random_layer(
    sizes: MoeSizes, num_rows: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> MoeLayer:
    """Activations and logits of deviation about 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, depth: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values * depth**-0.5

    hidden, experts, inner, shared = sizes.hidden, sizes.experts, sizes.inner, sizes.shared
    return MoeLayer(
        x=normal(num_rows, hidden, depth=1),
        router=normal(experts, hidden, depth=hidden),
        gate_up=normal(experts, 2 * inner, hidden, depth=hidden),
        down=normal(experts, hidden, inner, depth=inner),
        shared_gate_up=normal(2 * shared, hidden, depth=hidden),
        shared_down=normal(hidden, shared, depth=shared),
        shared_gate=normal(1, hidden, depth=hidden),
    )


def oracle_route(x: Tensor, router: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """fp64 weights and ids [T, top_k], best first, equal logits by id."""
    probabilities = (x.double() @ router.double().t()).softmax(-1)
    ordered = probabilities.sort(dim=-1, descending=True, stable=True)
    weights, ids = ordered.values[:, :top_k], ordered.indices[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), ids


def oracle_swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert in fp64."""
    gate, up = (x @ gate_up.double().t()).chunk(2, dim=-1)
    inner: Tensor = gate * torch.sigmoid(gate) * up
    return inner @ down.double().t()


def oracle_mlp(layer: MoeLayer, top_k: int, renormalise: bool) -> Tensor:
    """The whole layer in fp64, expert by expert: [T, hidden]."""
    x = layer.x.double()
    weights, ids = oracle_route(x, layer.router, top_k, renormalise)
    shared = oracle_swiglu(x, layer.shared_gate_up, layer.shared_down)
    out: Tensor = torch.sigmoid(x @ layer.shared_gate.double().t()) * shared
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        product = oracle_swiglu(x[rows], layer.gate_up[expert], layer.down[expert])
        out.index_add_(0, rows, product * weights[rows, slots, None])
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the oracle; NaN where anything is NaN."""
    return float((actual.double() - expected).norm() / expected.norm())
