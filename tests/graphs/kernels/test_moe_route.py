"""Routing and grouping: which experts a row gets, and where its pairs go."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphs.kernels.moe import ops, reference
from graphs.kernels.moe.configs import DotConfig, RouterConfig, router_config
from graphs.kernels.moe.routing import choose_experts, group_pairs, router_logits
from tests.graphs.kernels.moe_cases import (
    GEOMETRIES,
    MANY_EXPERTS,
    TINY,
    TOP_1,
    UNEVEN,
    MoeSizes,
    oracle_route,
    random_layer,
    relative_error,
)
from tests.tolerances import KERNEL_FP32_RTOL

BF16_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter's dot is wrong


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("sizes", [TINY, UNEVEN, TOP_1, MANY_EXPERTS], ids=str)
@pytest.mark.parametrize(("num_rows", "renormalise"), [(1, True), (17, False)])
def test_the_best_experts_in_order(
    device: torch.device, num_rows: int, renormalise: bool, sizes: MoeSizes
) -> None:
    """E7: weights and ids of the top k, best first. Oracle: fp64 softmax and a stable sort."""
    layer = random_layer(sizes, num_rows, torch.float32, device)
    expected, expected_ids = oracle_route(layer.x, layer.router, sizes.top_k, renormalise)
    weights, ids = ops.route(layer.x, layer.router, sizes.top_k, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.long(), expected_ids)
    assert relative_error(weights, expected) < KERNEL_FP32_RTOL
    weights, ids = reference.route(layer.x, layer.router, sizes.top_k, renormalise)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids.long(), expected_ids)
    assert relative_error(weights, expected) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("dtype", [torch.float16, BF16_GPU])
@pytest.mark.parametrize(("num_rows", "splits"), [(1, 1), (1, 2), (33, 3)])
def test_split_sums_are_the_whole_sum(
    device: torch.device, num_rows: int, splits: int, dtype: torch.dtype
) -> None:
    """E7: low-precision logits, the hidden dim split as on the GPU. Oracle: fp64 softmax of the
    same inputs."""
    sizes = MoeSizes(80, 20, 16, 16, 3)
    layer = random_layer(sizes, num_rows, dtype, device)
    config = RouterConfig(DotConfig(16, 16, 16, 4, 2), splits, 4, 4)
    logits = router_logits(layer.x, layer.router, layer.shared_gate, config)
    assert logits.shape[0] == splits
    routing = choose_experts(logits, sizes.experts, sizes.top_k, sizes.top_k + 1, False, config)
    expected, expected_ids = oracle_route(layer.x, layer.router, sizes.top_k, False)
    shared = torch.sigmoid(layer.x.double() @ layer.shared_gate.double().t())
    assert torch.equal(routing.ids[:, :-1].long(), expected_ids)
    # Products of bf16 and of fp16 are exact in fp32, so the fp32 bar holds.
    assert relative_error(routing.weights[:, :-1], expected) < KERNEL_FP32_RTOL
    assert relative_error(routing.weights[:, -1:], shared) < KERNEL_FP32_RTOL
    assert (routing.ids[:, -1] == sizes.experts).all()


def test_ties_go_to_the_lowest_id(device: torch.device) -> None:
    """E7: equal logits, also 0.0 and -0.0. Oracle: experts in twos, by hand."""
    router = torch.tensor([[-1.0], [0.0], [1.0], [-0.0], [1.0], [-1.0]], device=device)
    x = torch.tensor([[2.0], [-2.0], [0.0], [-0.0]], device=device)
    expected = torch.tensor(
        [[2, 4, 1, 3, 0], [0, 5, 1, 3, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]],
        dtype=torch.int32,
        device=device,
    )
    for route in (ops.route, reference.route):
        weights, ids = route(x, router, 5, True)
        assert torch.equal(ids, expected)
        assert torch.equal(weights[:, 0], weights[:, 1])


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_poisoned_row_stays_alone(device: torch.device) -> None:
    """E7: a row of NaN gets distinct, valid ids, the others what they get without it. Oracle:
    the same rows alone."""
    layer = random_layer(UNEVEN, 9, torch.float32, device)
    clean = ops.route(layer.x, layer.router, 3, True)
    x = layer.x.clone()
    x[4] = torch.nan
    x[7] = -torch.inf
    weights, ids = ops.route(x, layer.router, 3, True)
    assert ((ids >= 0) & (ids < UNEVEN.experts)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    others = [row for row in range(9) if row not in (4, 7)]
    assert torch.equal(ids[others], clean[1][others])
    assert torch.equal(weights[others], clean[0][others])
    assert weights[4].isnan().all()


@pytest.mark.parametrize("sizes", [UNEVEN, TOP_1, MANY_EXPERTS], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "tile_rows", "route_rows"), [(1, 16, 8), (65, 16, 8), (65, 64, 2)]
)
def test_pairs_are_sorted_by_expert(
    device: torch.device, num_rows: int, tile_rows: int, route_rows: int, sizes: MoeSizes
) -> None:
    """E7: every pair once, by expert and then by row, and tiles that cover each expert's pairs,
    for few and for many programs of the top-k. Oracle: a stable sort of the ids."""
    layer = random_layer(sizes, num_rows, torch.float32, device)
    num_slots = sizes.top_k + 1
    config = router_config(num_rows, sizes.hidden, sizes.experts, torch.float32)
    config = dataclasses.replace(config, route_rows=route_rows)
    logits = router_logits(layer.x, layer.router, layer.shared_gate, config)
    routing = choose_experts(logits, sizes.experts, sizes.top_k, num_slots, True, config)
    pairs, tiles = group_pairs(routing, config, tile_rows)
    ids = routing.ids.flatten().tolist()
    by_expert = sorted(range(num_rows * num_slots), key=lambda pair: ids[pair])
    assert pairs.tolist() == by_expert
    covered = []
    for expert, first, end in tiles.t().tolist():
        if expert < 0:
            continue
        last = min(first + tile_rows, end)
        assert first < last
        assert {ids[pair] for pair in by_expert[first:last]} == {expert}
        covered += list(range(first, last))
    assert covered == list(range(num_rows * num_slots))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("num_rows", [1, 63, 500, 8192])
def test_real_sizes(name: str, num_rows: int) -> None:
    """E7: routing at the sizes of real models in bf16. Oracle: fp64 softmax of exact inputs, up
    to near ties: chosen experts have the oracle's probabilities, rank by rank."""
    sizes = GEOMETRIES[name]
    sizes = dataclasses.replace(sizes, inner=16, shared=16)
    layer = random_layer(sizes, num_rows, torch.bfloat16, torch.device("cuda"))
    expected, _ = oracle_route(layer.x, layer.router, sizes.top_k, True)
    weights, ids = ops.route(layer.x, layer.router, sizes.top_k, True)
    probabilities = (layer.x.double() @ layer.router.double().t()).softmax(-1)
    chosen = probabilities.gather(1, ids.long())
    chosen = chosen / chosen.sum(-1, keepdim=True)
    assert relative_error(chosen, expected) < KERNEL_FP32_RTOL
    assert relative_error(weights, expected) < KERNEL_FP32_RTOL
