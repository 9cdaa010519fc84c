"""V9: the commit of all GDN layers in one launch: its grid, its layers, its launch shapes."""

from __future__ import annotations

import pytest
import torch

from graphs.kernels.gdn.commit import CommitConfig, commit_grid, gdn_commit, launch_commit
from graphs.kernels.gdn.stash import VerifyStash, allocate_stash, stash_bytes_per_row
from tests.graphs.gdn_driver import GdnDriver, Geometry, Setup

FP32, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_layers(
    geometry: Geometry,
    num_layers: int,
    num_requests: int,
    num_rows: int,
    device: torch.device,
    dtype: torch.dtype = FP32,
) -> tuple[VerifyStash, torch.Tensor, torch.Tensor]:
    """Random stash and pools of several layers; NaN in what no request owns."""
    stash = allocate_stash(
        num_layers,
        num_requests + 1,
        num_rows,
        num_k_heads=geometry.num_k_heads,
        num_v_heads=geometry.num_v_heads,
        head_k_dim=geometry.head_k_dim,
        head_v_dim=geometry.head_v_dim,
        dtype=dtype,
        device=device,
    )
    for tensor in stash:
        tensor.fill_(torch.nan)
        tensor[:, :num_requests] = torch.rand_like(tensor[:, :num_requests])
    driver = GdnDriver(Setup(geometry, device, dtype), num_requests + 1)
    pools = (
        torch.stack([driver.conv_pool] * num_layers),
        torch.stack([driver.state_pool] * num_layers),
    )
    for pool in pools:
        pool[:, 1:] = torch.randn_like(pool[:, 1:])
    return stash, *pools


def commit_layer_by_layer(
    stash: VerifyStash,
    requests: list[torch.Tensor],
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    num_k_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the pools after a launch for each layer."""
    pools = conv_pool.clone(), state_pool.clone()
    for layer in range(conv_pool.shape[0]):
        of_layer = [tensor[layer : layer + 1] for tensor in (*stash, *pools)]
        gdn_commit(*of_layer[:5], *requests, *of_layer[5:], num_k_heads)
    return pools


def make_requests(num_requests: int, num_rows: int, device: torch.device) -> list[torch.Tensor]:
    """Positions, accept counts and slots; every third request is padding."""
    counts = torch.arange(num_requests) % (num_rows + 1)
    slots = torch.arange(num_requests) + 1
    slots[2::3] = 0
    positions = torch.arange(num_requests) * 7 % 90 + 1
    return [tensor.to(device) for tensor in (positions, counts, slots)]


def test_all_layers_at_once_are_each_layer_alone(device: torch.device) -> None:
    """V9: Oracle: one launch per layer, torch.equal; `gdn_decode` is theirs."""
    torch.manual_seed(0)
    geometry = Geometry(1, 2, 8, 16, 4)
    stash, conv_pool, state_pool = make_layers(geometry, 3, 4, 2, device)
    requests = make_requests(4, 2, device)
    expected = commit_layer_by_layer(stash, requests, conv_pool, state_pool, 1)
    untouched = state_pool[:, [0, 3]].clone()
    gdn_commit(*stash, *requests, conv_pool, state_pool, 1)
    assert torch.equal(conv_pool.nan_to_num(9.0), expected[0].nan_to_num(9.0))
    assert torch.equal(state_pool.nan_to_num(9.0), expected[1].nan_to_num(9.0))
    assert torch.equal(state_pool[:, [0, 3]].nan_to_num(9.0), untouched.nan_to_num(9.0))
    assert not torch.equal(expected[1][0, 2], expected[1][1, 2])


@pytest.mark.parametrize("config", [(2, 1), (2, 2), (4, 1), (4, 4)], ids=str)
def test_the_launch_shape_changes_no_bit(config: tuple[int, int], device: torch.device) -> None:
    """V9: blocks per program and ahead. Oracle: one block per program, torch.equal."""
    torch.manual_seed(1)
    stash, conv_pool, state_pool = make_layers(Geometry(1, 1, 8, 128, 4), 1, 2, 2, device)
    requests = [torch.tensor(x, device=device) for x in ([3, 8], [1, 2], [2, 1])]
    pools = conv_pool.clone(), state_pool.clone()
    launch_commit(CommitConfig(1, 1), stash, *requests, conv_pool, state_pool, 1)
    launch_commit(CommitConfig(*config), stash, *requests, *pools, 1)
    assert not torch.equal(pools[1][0, 1, 0, 96:], torch.zeros_like(pools[1][0, 1, 0, 96:]))
    assert torch.equal(pools[0][:, 1:], conv_pool[:, 1:])
    assert torch.equal(pools[1][:, 1:], state_pool[:, 1:])


def test_programs_lie_on_one_axis() -> None:
    """V9: x alone holds more than 65,535. Oracle: CUDA's limits, no launch."""
    assert commit_grid(48, 64, 48, 4) == (589_824,)
    assert commit_grid(1, 1, 1, 1) == (1,)
    with pytest.raises(AssertionError):
        commit_grid(2**11, 2**10, 2**10, 1)


def test_the_stash_has_the_bytes_that_are_counted() -> None:
    """V15: Oracle: the allocation itself; 1.7 MiB per row of the 27B model's 48 layers."""
    sizes = {"num_k_heads": 16, "num_v_heads": 48, "head_k_dim": 128, "head_v_dim": 128}
    stash = allocate_stash(48, 2, 3, **sizes, dtype=BF16, device=torch.device("meta"))
    num_bytes = stash_bytes_per_row(**sizes, dtype_bytes=BF16.itemsize)
    assert sum(tensor.nbytes for tensor in stash) == 48 * 2 * 3 * num_bytes
    assert 1.6 < 48 * num_bytes / 2**20 < 1.8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("geometry", "num_layers", "num_requests"),
    [(Geometry(2, 6, 16, 8, 4), 48, 250), (Geometry(16, 48, 128, 128, 4), 48, 8)],
    ids=str,
)
def test_more_programs_than_a_grid_axis_holds(
    geometry: Geometry, num_layers: int, num_requests: int
) -> None:
    """V9: more than 65,535 programs. Oracle: one launch per layer, torch.equal."""
    torch.manual_seed(2)
    device, num_k_heads = torch.device("cuda"), geometry.num_k_heads
    stash, conv_pool, state_pool = make_layers(geometry, num_layers, num_requests, 4, device, BF16)
    requests = make_requests(num_requests, 4, device)
    expected = commit_layer_by_layer(stash, requests, conv_pool, state_pool, num_k_heads)
    before = state_pool.clone()
    gdn_commit(*stash, *requests, conv_pool, state_pool, num_k_heads)
    assert torch.equal(conv_pool[:, 1:], expected[0][:, 1:])
    assert torch.equal(state_pool[:, 1:], expected[1][:, 1:])
    committed = (requests[1] > 0) & (requests[2] > 0)
    is_changed = (state_pool[:, 1:] != before[:, 1:]).flatten(2).any(2)
    assert torch.equal(is_changed, committed.expand_as(is_changed))
    del before, expected, stash, conv_pool, state_pool
    torch.cuda.empty_cache()
