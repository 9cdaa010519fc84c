"""The mixture-of-experts op, whole and path by path."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from graphs.kernels.moe import ops, reference
from graphs.kernels.moe.configs import (
    DotConfig,
    GroupedConfig,
    PairConfig,
    VectorConfig,
    grouped_config,
    pair_config,
    router_config,
)
from graphs.kernels.moe.experts import Experts, run_grouped, run_pairs
from graphs.kernels.moe.routing import choose_experts, router_logits
from tests.graphs.kernels.moe_cases import (
    GEOMETRIES,
    MANY_EXPERTS,
    TINY,
    TOP_1,
    UNEVEN,
    MoeLayer,
    MoeSizes,
    oracle_mlp,
    random_layer,
    relative_error,
)
from tests.tolerances import KERNEL_BF16_RTOL, KERNEL_FP32_RTOL

# The interpreter's dot is wrong.
BF16_GPU = pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.sanitize])
SANITIZED_PATHS = [
    pytest.param(*path, marks=pytest.mark.sanitize) for path in [(3, None), (17, 32)]
]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run_path(layer: MoeLayer, sizes: MoeSizes, path: GroupedConfig | None) -> Tensor:
    """The pairs' path, or the grouped one with a configuration."""
    num_rows = layer.x.shape[0]
    experts = Experts(*layer.weights[1:5])
    router = router_config(num_rows, sizes.hidden, sizes.experts, layer.x.dtype)
    logits = router_logits(layer.x, layer.router, layer.shared_gate, router)
    if path is None:
        config = pair_config(num_rows, sizes.hidden, sizes.inner, sizes.top_k, layer.x.dtype)
        return run_pairs(layer.x, logits, experts, sizes.top_k, True, config)
    routing = choose_experts(logits, sizes.experts, sizes.top_k, sizes.top_k + 1, True, router)
    return run_grouped(layer.x, routing, experts, router, path)


@pytest.mark.parametrize(
    ("sizes", "num_rows", "renormalise"),
    [(TINY, rows, True) for rows in (1, 2, 15, 16, 17, 63, 65)]
    + [(UNEVEN, 1, False), (UNEVEN, 65, False), (TOP_1, 1, True), (TOP_1, 17, False)]
    + [(MANY_EXPERTS, 1, True), (MANY_EXPERTS, 5, True)]
    + [pytest.param(MANY_EXPERTS, 500, True, marks=pytest.mark.gpu)],
    ids=str,
)
def test_the_layer(device: torch.device, renormalise: bool, sizes: MoeSizes, num_rows: int) -> None:
    """E7: routed and shared experts in fp32, op and reference. Oracle: fp64, expert by expert."""
    layer = random_layer(sizes, num_rows, torch.float32, device)
    expected = oracle_mlp(layer, sizes.top_k, renormalise)
    for mlp in (ops.moe_mlp, reference.moe_mlp):
        out = mlp(layer.x, *layer.weights, sizes.top_k, renormalise)
        assert out.dtype == layer.x.dtype
        assert relative_error(out, expected) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("dtype", [torch.float16, BF16_GPU])
@pytest.mark.parametrize("num_rows", [1, 17])
def test_low_precision_inputs(device: torch.device, num_rows: int, dtype: torch.dtype) -> None:
    """E7: bf16 and fp16. Oracle: fp64 of the same inputs."""
    layer = random_layer(UNEVEN, num_rows, dtype, device)
    out = ops.moe_mlp(layer.x, *layer.weights, UNEVEN.top_k, True)
    assert out.dtype == dtype
    assert relative_error(out, oracle_mlp(layer, UNEVEN.top_k, True)) < KERNEL_BF16_RTOL


@pytest.mark.parametrize(
    ("num_rows", "tile_rows"), [*SANITIZED_PATHS, (1, 16), (2, 64), (33, 16), (65, 64)]
)
def test_every_path_at_any_size(device: torch.device, num_rows: int, tile_rows: int | None) -> None:
    """E7: the pairs' path and tiles of each height where no table picks them. Oracle: fp64."""
    layer = random_layer(UNEVEN, num_rows, torch.float32, device)
    path = None
    if tile_rows is not None:
        dot = DotConfig(tile_rows, 16, 16, 4, 2)
        path = GroupedConfig(gate_up=dot, down=dataclasses.replace(dot, block_n=32))
    out = run_path(layer, UNEVEN, path)
    assert relative_error(out, oracle_mlp(layer, UNEVEN.top_k, True)) < KERNEL_FP32_RTOL


@pytest.mark.parametrize(("num_rows", "slots_ahead"), [(1, 2), (2, 3)])
def test_pairs_in_any_blocks(device: torch.device, num_rows: int, slots_ahead: int) -> None:
    """E7: rows longer than a block, and down weights loaded for all or some of a row's
    experts ahead. Oracle: fp64."""
    sizes = MoeSizes(24, 6, 12, 20, 3)
    layer = random_layer(sizes, num_rows, torch.float32, device)
    router = router_config(num_rows, sizes.hidden, sizes.experts, torch.float32)
    logits = router_logits(layer.x, layer.router, layer.shared_gate, router)
    blocks = VectorConfig(block_n=8, block_k=8, num_warps=1)
    config = PairConfig(gate_up=blocks, down=blocks, slots_ahead=slots_ahead)
    out = run_pairs(layer.x, logits, Experts(*layer.weights[1:5]), sizes.top_k, False, config)
    assert relative_error(out, oracle_mlp(layer, sizes.top_k, False)) < KERNEL_FP32_RTOL


@pytest.mark.parametrize("num_rows", [1, 40])
def test_all_rows_choose_the_same_experts(device: torch.device, num_rows: int) -> None:
    """E7: two experts get everything, several tiles each, the others nothing; the others' weights
    are NaN and never read. Oracle: fp64."""
    layer = random_layer(UNEVEN, num_rows, torch.float32, device)
    layer.x[:, 0] = 100.0
    layer.router[:, 0] = torch.tensor([0.0, 1.0, 0.0, 0.9, 0.0], device=device)
    layer.gate_up[[0, 2, 4]] = torch.nan
    layer.down[[0, 2, 4]] = torch.nan
    out = ops.moe_mlp(layer.x, *layer.weights, 2, True)
    assert relative_error(out, oracle_mlp(layer, 2, True)) < KERNEL_FP32_RTOL


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("num_rows", [2, 7])
def test_a_poisoned_row_stays_alone(device: torch.device, num_rows: int) -> None:
    """E7: a row of NaN changes no bit of other rows. Oracle: the op without the poison."""
    layer = random_layer(UNEVEN, num_rows, torch.float32, device)
    clean = ops.moe_mlp(layer.x, *layer.weights, UNEVEN.top_k, True)
    x = layer.x.clone()
    x[1] = torch.nan
    out = ops.moe_mlp(x, *layer.weights, UNEVEN.top_k, True)
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(out[others], clean[others])
    assert out[1].isnan().all()


def test_rows_with_gaps(device: torch.device) -> None:
    """E7: x may be a slice of wider rows; inputs stay as they are. Oracle: the contiguous copy."""
    layer = random_layer(TINY, 6, torch.float32, device)
    wide = torch.cat([layer.x, layer.x + 1.0], dim=1)
    before = wide.clone()
    out = ops.moe_mlp(wide[:, : TINY.hidden], *layer.weights, TINY.top_k, True)
    assert torch.equal(out, ops.moe_mlp(layer.x, *layer.weights, TINY.top_k, True))
    assert torch.equal(wide, before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 64, 65, 500, 2048, 8192])
def test_real_sizes(name: str, num_rows: int) -> None:
    """E7: the sizes of real models in bf16; results repeat bit by bit. Oracle: fp64."""
    sizes = GEOMETRIES[name]
    layer = random_layer(sizes, num_rows, torch.bfloat16, torch.device("cuda"))
    out = ops.moe_mlp(layer.x, *layer.weights, sizes.top_k, True)
    assert relative_error(out, oracle_mlp(layer, sizes.top_k, True)) < KERNEL_BF16_RTOL
    assert torch.equal(out, ops.moe_mlp(layer.x, *layer.weights, sizes.top_k, True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 500])
def test_real_sizes_fp32(num_rows: int) -> None:
    """E7: fp32 without tf32. Oracle: fp64."""
    sizes = GEOMETRIES["35B-A3B"]
    layer = random_layer(sizes, num_rows, torch.float32, torch.device("cuda"))
    out = ops.moe_mlp(layer.x, *layer.weights, sizes.top_k, True)
    assert relative_error(out, oracle_mlp(layer, sizes.top_k, True)) < KERNEL_FP32_RTOL


@pytest.mark.gpu
def test_compiled_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """E5, E7: compiled whole for any batch, and captured, without copies of the weights. Oracle:
    the eager op, bit by bit."""
    monkeypatch.undo()  # a compiled function allocates on its own
    sizes = GEOMETRIES["35B-A3B"]
    layer = random_layer(sizes, 96, torch.bfloat16, torch.device("cuda"))

    def mlp(x: Tensor) -> Tensor:
        out: Tensor = ops.moe_mlp(x * 2.0, *layer.weights, sizes.top_k, True)
        return out * 2.0

    # Weights of symbolic sizes would keep the compiler busy for minutes; a model's never are.
    compiled = torch.compile(mlp, fullgraph=True)
    weight_bytes = layer.gate_up.nbytes
    torch.cuda.reset_peak_memory_stats()
    first_bytes = torch.cuda.memory_allocated()
    for num_rows in (1, 2, 24, 96):
        x = layer.x[:num_rows].clone()
        expected = mlp(x)
        assert torch.equal(compiled(x), expected)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        out.fill_(torch.nan)
        x.copy_(layer.x[:num_rows].flip(0))
        graph.replay()
        assert torch.equal(out, mlp(x))
    assert torch.cuda.max_memory_allocated() - first_bytes < weight_bytes // 4


def test_the_tables_fit_any_size() -> None:
    """E7: both products share their tiles, dots are at least 16 deep, and a lane's share of the
    weights on their way fits its registers. Oracle: the limits of `tl.dot` and of the GPU."""
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (1, 64, 500, 8192):
            for sizes in (TINY, UNEVEN, MANY_EXPERTS, *GEOMETRIES.values()):
                config = grouped_config(
                    num_rows, sizes.experts, sizes.top_k, sizes.hidden, sizes.inner, dtype
                )
                assert min(config.gate_up.block_k, config.down.block_k) >= 16
                assert min(config.gate_up.block_n, config.down.block_n) >= 16
                pairs = pair_config(num_rows, sizes.hidden, sizes.inner, sizes.top_k, dtype)
                assert 1 <= pairs.slots_ahead <= sizes.top_k
                lane_values = pairs.slots_ahead * pairs.down.block_n * sizes.inner // 32
                lane_values //= pairs.down.num_warps
                assert pairs.slots_ahead == 1 or lane_values * dtype.itemsize // 4 <= 128
