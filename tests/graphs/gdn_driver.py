"""Runs GDN kernels on requests of random rows, with pools full of NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import build_chunks
from graphs.kernels.gdn import reference, verify_reference
from graphs.kernels.gdn.stash import VerifyStash, allocate_stash
from tests.oracle.gated_delta import gated_norm, gdn_sequence

CPU = torch.device("cpu")
NUM_SLOTS = 5
EPS = 1e-6


@dataclass(frozen=True)
class Geometry:
    """Key heads, value heads, key dim, value dim, conv taps."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    num_taps: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


@dataclass(frozen=True)
class Rows:
    """Random inputs of one request, [T, ...]."""

    conv_in: Tensor
    z: Tensor
    b: Tensor
    a: Tensor

    def projected(self, start: int, stop: int) -> Tensor:
        """The in-projection's output of rows start to stop."""
        return torch.cat([x[start:stop] for x in (self.conv_in, self.z, self.b, self.a)], dim=1)


@dataclass(frozen=True)
class Setup:
    """Where and in what precision: model dtype, state dtype, device, and the kernels."""

    geometry: Geometry
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    decode: Callable[..., Tensor] = reference.gdn_decode
    prefill: Callable[..., tuple[Tensor, Tensor]] = reference.gdn_prefill
    verify: Callable[..., Tensor] = verify_reference.gdn_verify
    commit: Callable[..., None] = verify_reference.gdn_commit


class GdnDriver:
    """The parameters that the core reads, its pools, and calls to it."""

    def __init__(self, setup: Setup, num_slots: int = NUM_SLOTS) -> None:
        self.setup, geometry = setup, setup.geometry
        heads = geometry.num_v_heads
        self.conv = self._random(geometry.conv_dim, geometry.num_taps) * 0.5
        self.a_log = torch.randn(heads, device=setup.device) * 0.5
        self.dt_bias = torch.randn(heads, device=setup.device)
        self.norm = self._random(geometry.head_v_dim)
        ring = num_slots, geometry.num_taps, geometry.conv_dim
        state = num_slots, heads, geometry.head_v_dim, geometry.head_k_dim
        self.conv_pool = torch.full(ring, torch.nan, dtype=setup.dtype, device=setup.device)
        self.state_pool = torch.full(state, torch.nan, dtype=setup.state_dtype, device=setup.device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.setup.device).to(self.setup.dtype)

    def make_rows(self, num_rows: int) -> Rows:
        geometry, heads = self.setup.geometry, self.setup.geometry.num_v_heads
        return Rows(
            conv_in=self._random(num_rows, geometry.conv_dim),
            z=self._random(num_rows, heads * geometry.head_v_dim),
            b=self._random(num_rows, heads) * 2,
            a=self._random(num_rows, heads) * 2,
        )

    def prefill(self, parts: Sequence[tuple[int, Rows, int, int]]) -> tuple[list[Tensor], Tensor]:
        """One call over (slot, rows, start, stop) parts, a padding request and padding rows.

        Returns each part's outputs [L, HV * V] and the boundary states.
        """
        device = self.setup.device
        lens = [stop - start for *_, start, stop in parts]
        row_starts = [0]
        for num_rows in lens:
            row_starts.append(row_starts[-1] + num_rows)
        row_starts.append(row_starts[-1])
        chunks, chunk_starts = build_chunks(row_starts)
        projected = [rows.projected(start, stop) for _, rows, start, stop in parts]
        positions = [position for *_, start, stop in parts for position in range(start, stop)]
        out, states = self.setup.prefill(
            torch.cat([*projected, self.make_rows(3).projected(0, 3)]),
            torch.tensor([*positions, 0, 0, 0], device=device),
            torch.tensor(row_starts, device=device),
            torch.tensor(chunks, device=device),
            torch.tensor(chunk_starts, device=device),
            torch.tensor([slot for slot, *_ in parts] + [0], device=device),
            self.conv,
            self.a_log,
            self.dt_bias,
            self.norm,
            self.conv_pool,
            self.state_pool,
            self.setup.geometry.num_k_heads,
            EPS,
        )
        return list(out[: sum(lens)].split(lens)), states

    def decode(
        self, slots: Sequence[int], requests: Sequence[Rows], row: int | Sequence[int]
    ) -> Tensor:
        """One call of one row of each request, at that position; [R, HV * V]."""
        device = self.setup.device
        positions = [row] * len(slots) if isinstance(row, int) else row
        return self.setup.decode(
            torch.cat([r.projected(p, p + 1) for r, p in zip(requests, positions, strict=True)]),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            self.conv,
            self.a_log,
            self.dt_bias,
            self.norm,
            self.conv_pool,
            self.state_pool,
            self.setup.geometry.num_k_heads,
            EPS,
        )

    def make_stash(self, max_requests: int, num_rows: int) -> VerifyStash:
        """The stash of this one layer, [1, R, rows, ...], full of NaN."""
        geometry = self.setup.geometry
        stash = allocate_stash(
            1,
            max_requests,
            num_rows,
            num_k_heads=geometry.num_k_heads,
            num_v_heads=geometry.num_v_heads,
            head_k_dim=geometry.head_k_dim,
            head_v_dim=geometry.head_v_dim,
            dtype=self.setup.dtype,
            device=self.setup.device,
        )
        for tensor in stash:
            tensor.fill_(torch.nan)
        return stash

    def verify(
        self,
        slots: Sequence[int],
        requests: Sequence[Rows],
        starts: Sequence[int],
        num_rows: int,
        stash: VerifyStash,
    ) -> Tensor:
        """One call of num_rows rows of each request from its start; [R, num_rows, HV * V]."""
        device = self.setup.device
        parts = list(zip(requests, starts, strict=True))
        out = self.setup.verify(
            torch.cat([rows.projected(start, start + num_rows) for rows, start in parts]),
            torch.tensor([start + row for start in starts for row in range(num_rows)]).to(device),
            torch.tensor(slots, device=device),
            self.conv,
            self.a_log,
            self.dt_bias,
            self.norm,
            self.conv_pool,
            self.state_pool,
            *stash.layer(0),
            self.setup.geometry.num_k_heads,
            EPS,
            num_rows,
        )
        return out.unflatten(0, (len(slots), num_rows))

    def commit(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        num_committed: Sequence[int],
        stash: VerifyStash,
    ) -> None:
        """One call that takes the first num_committed stashed rows of each request."""
        device = self.setup.device
        self.setup.commit(
            *stash,
            torch.tensor(starts, device=device),
            torch.tensor(num_committed, device=device),
            torch.tensor(slots, device=device),
            self.conv_pool[None],
            self.state_pool[None],
            self.setup.geometry.num_k_heads,
        )

    def expect(self, rows: Rows, stop: int) -> tuple[Tensor, Tensor]:
        """fp64 outputs [stop, HV * V] and last state of a request's first `stop` rows."""
        geometry = self.setup.geometry
        o, state, _ = gdn_sequence(
            rows.conv_in[:stop].cpu(),
            rows.a[:stop].cpu(),
            rows.b[:stop].cpu(),
            self.conv.cpu(),
            self.a_log.cpu(),
            self.dt_bias.cpu(),
            geometry.num_k_heads,
            geometry.head_k_dim,
        )
        z = rows.z[:stop].cpu().unflatten(-1, o.shape[1:])
        return gated_norm(o, z, self.norm.cpu(), EPS).flatten(1), state

    def ring_of(self, slot: int, rows: Rows, stop: int) -> tuple[Tensor, Tensor]:
        """The last W raw conv inputs as the slot's ring has them, and as they were."""
        num_taps = self.setup.geometry.num_taps
        positions = torch.arange(max(0, stop - num_taps), stop, device=self.setup.device)
        return self.conv_pool[slot, positions % num_taps], rows.conv_in[positions]


def spread_slots(pool: Tensor, slot_stride: int) -> Tensor:
    """A copy of pool whose slots lie slot_stride elements apart."""
    num_elements = (pool.shape[0] - 1) * slot_stride + pool[0].numel()
    memory = torch.empty(num_elements, dtype=pool.dtype, device=pool.device)
    spread = memory.as_strided(pool.shape, (slot_stride, *pool.stride()[1:]))
    return spread.copy_(pool)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the fp64 expectation."""
    return float((got.cpu().double() - expected).norm() / expected.norm())
