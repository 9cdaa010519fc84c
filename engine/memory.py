"""How many bytes each part takes, and how many pages fit: arithmetic, no allocation."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model_config import LayerKind, ModelConfig


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit of each cache: a token's keys and values, a request's GDN slot."""

    kv_per_token: int
    gdn_per_slot: int


@dataclass(frozen=True)
class MemoryPlan:
    """A split of the budget. All sizes in bytes; counts exclude the padding page and slot."""

    budget_bytes: int
    weight_bytes: int
    slot_bytes: int
    page_bytes: int
    num_pages: int
    num_slots: int


def unit_bytes(
    config: ModelConfig, *, dtype_bytes: int, state_dtype_bytes: int, sampling_slot_bytes: int
) -> UnitBytes:
    """Bytes of the cache units of one model; the sampling state counts with the slot."""
    num_attention = config.layer_kinds.count(LayerKind.ATTENTION)
    num_gdn = config.layer_kinds.count(LayerKind.GDN)
    kv = num_attention * 2 * config.num_kv_heads * config.head_dim * dtype_bytes
    ring = config.conv_kernel * config.conv_dim * dtype_bytes
    state = (
        config.num_v_heads_gdn * config.head_v_dim_gdn * config.head_k_dim_gdn * state_dtype_bytes
    )
    return UnitBytes(kv_per_token=kv, gdn_per_slot=num_gdn * (ring + state) + sampling_slot_bytes)


def plan_memory(
    units: UnitBytes,
    *,
    free_bytes: int,
    memory_ratio: float,
    weight_bytes: int,
    num_slots: int,
    page_size: int,
    wanted_pages: int,
    min_pages: int,
) -> MemoryPlan:
    """Pages that fit beside weights and slots, at most `wanted_pages`.

    Raises:
        ValueError: fewer than `min_pages` fit; the message has the numbers and the flags.
    """
    budget = int(free_bytes * memory_ratio)
    slot_bytes = (1 + num_slots) * units.gdn_per_slot
    page_bytes = page_size * units.kv_per_token
    left = budget - weight_bytes - slot_bytes - page_bytes
    num_pages = wanted_pages if page_bytes == 0 else min(wanted_pages, max(left, 0) // page_bytes)
    if num_pages < min_pages:
        raise ValueError(
            f"the model does not fit: weights {show(weight_bytes)}, {num_slots} GDN slots "
            f"{show(slot_bytes)} and {min_pages} KV pages {show(min_pages * page_bytes)} exceed "
            f"{show(budget)} ({memory_ratio:g} of {show(free_bytes)} free); lower "
            f"--max-running-requests, --max-model-len, --max-kv-tokens or --page-size, or raise "
            f"--memory-ratio"
        )
    return MemoryPlan(
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        slot_bytes=slot_bytes,
        page_bytes=page_bytes,
        num_pages=num_pages,
        num_slots=num_slots,
    )


def show(num_bytes: int) -> str:
    """Bytes for people, in MiB or GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
