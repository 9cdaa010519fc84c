"""What a verify step and its commit must keep to, whichever kernels the driver has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.graphs.gdn_driver import GdnDriver, Rows, relative_error


def pool_bits(driver: GdnDriver) -> tuple[Tensor, Tensor]:
    """A copy of both pools as bytes, in which NaN equals NaN."""
    return driver.conv_pool.clone().view(torch.uint8), driver.state_pool.clone().view(torch.uint8)


def step_through(
    driver: GdnDriver,
    slots: Sequence[int],
    requests: Sequence[Rows],
    starts: Sequence[int],
    num_rows: int,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """num_rows decode steps: outputs [R, rows, HV * V], and the pools' bits after 0, 1, ... rows.

    The pools are as before afterwards.
    """
    pools = driver.conv_pool, driver.state_pool
    driver.conv_pool, driver.state_pool = (pool.clone() for pool in pools)
    outputs, history = [], [pool_bits(driver)]
    for row in range(num_rows):
        outputs.append(driver.decode(slots, requests, [start + row for start in starts]))
        history.append(pool_bits(driver))
    driver.conv_pool, driver.state_pool = pools
    return torch.stack(outputs, dim=1), history


def check_verify_and_commit(
    driver: GdnDriver, starts: Sequence[int], num_rows: int, *, spare_rows: int = 0
) -> None:
    """Requests and a padding request among them: verify, then every accept count for each.

    Bitwise against `step_through`; the stash of padding and of rows that no verify wrote, idle
    slots, the padding slot, and both pools during verify keep every bit. Needs a slot for each
    request and two more.
    """
    real = [slot + 2 for slot in range(len(starts))]
    rows = [driver.make_rows(start + num_rows) for start in starts]
    driver.prefill([(s, r, 0, start) for s, r, start in zip(real, rows, starts, strict=True)])
    slots, requests = [*real[:1], 0, *real[1:]], [rows[0], *rows]
    positions = [starts[0], *starts]
    outputs, history = step_through(driver, slots, requests, positions, num_rows)
    stash = driver.make_stash(len(slots) + 1, num_rows + spare_rows)
    before = pool_bits(driver)
    out = driver.verify(slots, requests, positions, num_rows, stash)
    assert torch.equal(out[:1], outputs[:1]) and torch.equal(out[2:], outputs[2:])
    assert not out[1].any()
    assert_equal_bits(pool_bits(driver), before)
    for tensor in stash:
        assert tensor[0, 1].isnan().all() and tensor[0, len(slots)].isnan().all()
        assert tensor[0, :, num_rows:].isnan().all()
        assert tensor[0, [0, *range(2, len(slots))], :num_rows].isfinite().all()
    pools = driver.conv_pool, driver.state_pool
    for shift in range(num_rows + 1):
        driver.conv_pool, driver.state_pool = (pool.clone() for pool in pools)
        counts = [(shift + index) % (num_rows + 1) for index in range(len(slots))]
        driver.commit(slots, positions, counts, stash)
        expected = tuple(bits.clone() for bits in before)
        for slot, count in zip(slots, counts, strict=True):
            if slot != 0:
                for pool, bits in zip(expected, history[count], strict=True):
                    pool[slot] = bits[slot]
        assert_equal_bits(pool_bits(driver), expected)


def assert_equal_bits(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Both pools, byte by byte."""
    for name, left, right in zip(("conv", "state"), got, expected, strict=True):
        slots = (left != right).flatten(1).any(1).nonzero().flatten().tolist()
        assert not slots, f"the {name} pool differs in slots {slots}"


def check_accepts(driver: GdnDriver, num_tokens: int, num_rows: int) -> None:
    """Random accept counts, 1 to num_rows, until two requests have num_tokens: as decoded singly.

    Bitwise: every committed row's output, and both pools in the end.
    """
    slots, starts = [3, 1], [1, 2]
    requests = [driver.make_rows(num_tokens + num_rows + 2) for _ in slots]
    driver.prefill([(s, r, 0, p) for s, r, p in zip(slots, requests, starts, strict=True)])
    pools = driver.conv_pool, driver.state_pool
    driver.conv_pool, driver.state_pool = (pool.clone() for pool in pools)
    steps = [
        driver.decode(slots, requests, [start + row for start in starts])
        for row in range(num_tokens)
    ]
    expected, final = torch.stack(steps, dim=1), pool_bits(driver)
    driver.conv_pool, driver.state_pool = pools
    stash = driver.make_stash(2, num_rows)
    got = torch.full_like(expected, torch.nan)
    done, generator = [0, 0], torch.Generator().manual_seed(0)
    while min(done) < num_tokens:
        positions = [start + count for start, count in zip(starts, done, strict=True)]
        out = driver.verify(slots, requests, positions, num_rows, stash)
        wanted = (torch.randint(num_rows, (2,), generator=generator) + 1).tolist()
        counts = [min(count, num_tokens - taken) for count, taken in zip(wanted, done, strict=True)]
        driver.commit(slots, positions, counts, stash)
        for request, count in enumerate(counts):
            taken = done[request]
            got[request, taken : taken + count] = out[request, :count]
            done[request] += count
    assert torch.equal(got, expected)
    assert_equal_bits(pool_bits(driver), final)


def check_session(driver: GdnDriver, tolerance: float) -> None:
    """V14: prefill, decode, verify, commits of 1, 2 and all rows in one batch, decode again.

    Against the fp64 recurrence over each request's tokens so far.
    """
    num_rows, slots, starts = 4, [3, 1, 2], [1, 4, 9]
    requests = [driver.make_rows(start + 8) for start in starts]
    driver.prefill([(s, r, 0, p) for s, r, p in zip(slots, requests, starts, strict=True)])
    outputs = [[out] for out in driver.decode(slots, requests, starts)]
    positions = [start + 1 for start in starts]
    stash = driver.make_stash(len(slots), num_rows)
    verified = driver.verify(slots, requests, positions, num_rows, stash)
    counts = [1, 2, num_rows]
    driver.commit(slots, positions, counts, stash)
    after = [position + count for position, count in zip(positions, counts, strict=True)]
    for request, out in enumerate(driver.decode(slots, requests, after)):
        outputs[request] += [*verified[request, : counts[request]], out]
    for slot, rows, start, got in zip(slots, requests, starts, outputs, strict=True):
        stop = start + len(got)
        expected, state = driver.expect(rows, stop)
        assert relative_error(torch.stack(got), expected[start:]) < tolerance
        assert relative_error(driver.state_pool[slot], state) < tolerance
        assert torch.equal(*driver.ring_of(slot, rows, stop))
