"""The mixture of experts of one layer: router, experts and shared expert, the whole op.

The bytes counted are those of the experts that the random rows hit, each once, of the shared
expert and of the router, and the rows in and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.kernel_timing import MIN_BYTES_PER_REPLAY, Ceiling, KernelCase
from graphs.kernels.moe.ops import moe_mlp
from graphs.kernels.moe.reference import route

NUM_LAYERS = 4  # a layer's shared expert has left the L2 cache when its turn comes again
BYTES = 2  # of bf16


@dataclass(frozen=True)
class Sizes:
    """hidden, experts, inner dims of an expert (the shared one has as many), experts per row."""

    geometry: str
    hidden: int
    experts: int
    inner: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.inner * BYTES


SPARSE = Sizes("Qwen3.6-35B-A3B", hidden=2048, experts=256, inner=512, top_k=8)
NEXT = Sizes("Qwen3-Next-80B-A3B", hidden=2048, experts=512, inner=512, top_k=10)
DECODE_BARS = {(SPARSE, 1): 0.60, (SPARSE, 64): 0.75}


def cases() -> Iterator[KernelCase]:
    """Decode batches of both geometries and a prefill of one."""
    for sizes in (SPARSE, NEXT):
        layers = [random_layer(sizes) for _ in range(NUM_LAYERS)]
        for num_rows in (1, 2, 4, 16, 64):
            yield decode_case(sizes, layers, num_rows)
        yield prefill_case(sizes, layers, 8192)
        del layers


def random_layer(sizes: Sizes) -> list[Tensor]:
    """router, gate_up, down, shared gate_up, shared down and shared gate; logits of deviation 1."""
    shapes = (
        (sizes.experts, sizes.hidden),
        (sizes.experts, 2 * sizes.inner, sizes.hidden),
        (sizes.experts, sizes.hidden, sizes.inner),
        (2 * sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
        (1, sizes.hidden),
    )
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)
        for shape in shapes
    ]


def random_rows(sizes: Sizes, num_rows: int) -> Tensor:
    return torch.randn(num_rows, sizes.hidden, device="cuda", dtype=torch.bfloat16)


def count_hit(sizes: Sizes, layer: list[Tensor], x: Tensor) -> int:
    """Distinct experts of the rows."""
    _, expert_ids = route(x, layer[0], sizes.top_k, True)
    return int(expert_ids.unique().numel())


def decode_case(sizes: Sizes, layers: list[list[Tensor]], num_rows: int) -> KernelCase:
    """One row per request; different rows, and so different experts, in every run."""
    least_bytes = (min(num_rows, 8) * sizes.top_k // 2 + 1) * sizes.expert_bytes
    num_runs = max(NUM_LAYERS, -(-MIN_BYTES_PER_REPLAY // least_bytes))
    pairs = [
        (layers[index % NUM_LAYERS], random_rows(sizes, num_rows)) for index in range(num_runs)
    ]
    num_hit = sum(count_hit(sizes, layer, x) for layer, x in pairs) / num_runs
    rows_bytes = 2 * num_rows * sizes.hidden * BYTES
    router_bytes = (sizes.experts + 1) * sizes.hidden * BYTES
    return KernelCase(
        name=f"moe_decode.{num_hit:.0f}_experts_hit",
        geometry=sizes.geometry,
        dtype="bfloat16",
        batch=num_rows,
        runs=[partial(moe_mlp, x, *layer, sizes.top_k, True) for layer, x in pairs],
        ceiling=Ceiling.READ,
        num_bytes=round((num_hit + 1) * sizes.expert_bytes) + router_bytes + rows_bytes,
        min_share=DECODE_BARS.get((sizes, num_rows)),
    )


def prefill_case(sizes: Sizes, layers: list[list[Tensor]], num_rows: int) -> KernelCase:
    """Thousands of rows, bound by the products."""
    x = random_rows(sizes, num_rows)
    expert_flops = 2 * 3 * sizes.hidden * sizes.inner
    router_flops = 2 * (sizes.experts + 1) * sizes.hidden
    return KernelCase(
        name="moe_prefill",
        geometry=sizes.geometry,
        dtype="bfloat16",
        batch=1,
        rows_per_request=num_rows,
        runs=[partial(moe_mlp, x, *layer, sizes.top_k, True) for layer in layers],
        ceiling=Ceiling.FLOPS,
        flops=num_rows * ((sizes.top_k + 1) * expert_flops + router_flops),
    )
