"""How many bytes each part takes, and how many pages fit: arithmetic, no allocation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from engine.model_config import LayerKind, ModelConfig
from graphs.kernels.gdn.stash import stash_bytes_per_row


@dataclass(frozen=True)
class DraftMemory:
    """What a draft method declares: bytes of its own, and per token of the target's KV cache.

    `num_weights`, `kv_values_per_token`, `values_per_slot`: the same, and per running request, in
    values of the model's dtype. `rows_per_request`: rows that a step scores for each request, its
    drafts and one more.
    """

    fixed_bytes: int = 0
    kv_per_token: int = 0
    num_weights: int = 0
    kv_values_per_token: int = 0
    values_per_slot: int = 0
    rows_per_request: int = 1


NO_DRAFTS = DraftMemory()


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit of each cache: a token's keys and values, a request's slot.

    The GDN part of a slot has the conv rings, the states and, with drafts, what a verify step
    leaves of each of the request's rows: `verify_scratch_per_row` bytes.
    """

    kv_per_token: int
    gdn_per_slot: int
    sampling_per_slot: int
    verify_scratch_per_row: int = 0
    draft_per_slot: int = 0

    @property
    def per_slot(self) -> int:
        """All that one more running request needs beside pages."""
        return self.gdn_per_slot + self.sampling_per_slot + self.draft_per_slot


@dataclass(frozen=True)
class FixedBytes:
    """Bytes of the parts that pages are not, in the order in which they are shown.

    `graphs`: what captured steps hold in their pool, and the graphs. `activations`: the blocks of
    the largest step that is not captured. `sampling`: logits and what choosing from them takes.
    `tables`: the device's page table. `drafts`: declared by the draft method. `reserve`: growth
    of the CUDA context, libraries' workspaces, and gaps between blocks of the allocator.
    """

    weights: int
    graphs: int
    activations: int
    sampling: int
    tables: int
    drafts: int
    reserve: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class MemoryPlan:
    """A split of the budget. Sizes in bytes; counts exclude the padding page and slot."""

    free_bytes: int
    budget_bytes: int
    fixed: FixedBytes
    units: UnitBytes
    page_size: int
    num_pages: int
    num_slots: int

    @property
    def weight_bytes(self) -> int:
        return self.fixed.weights

    @property
    def slot_bytes(self) -> int:
        """All slots, the padding slot with them."""
        return (1 + self.num_slots) * self.units.per_slot

    @property
    def page_bytes(self) -> int:
        """One page of all layers."""
        return self.page_size * self.units.kv_per_token

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of every part by name; their sum is at most `budget_bytes`."""
        pages = (1 + self.num_pages) * self.page_bytes
        return {**asdict(self.fixed), "slots": self.slot_bytes, "pages": pages}

    @property
    def used_bytes(self) -> int:
        """What all parts take together."""
        return sum(self.parts.values())


def unit_bytes(
    config: ModelConfig,
    *,
    dtype_bytes: int,
    state_dtype_bytes: int,
    sampling_slot_bytes: int,
    draft: DraftMemory = NO_DRAFTS,
) -> UnitBytes:
    """Bytes of the cache units of one model, and of what a draft method adds to each."""
    num_attention = config.layer_kinds.count(LayerKind.ATTENTION)
    num_gdn = config.layer_kinds.count(LayerKind.GDN)
    kv = num_attention * 2 * config.num_kv_heads * config.head_dim * dtype_bytes
    ring = config.conv_kernel * config.conv_dim * dtype_bytes
    state = (
        config.num_v_heads_gdn * config.head_v_dim_gdn * config.head_k_dim_gdn * state_dtype_bytes
    )
    scratch = 0
    if draft.rows_per_request > 1:
        scratch = num_gdn * stash_bytes_per_row(
            num_k_heads=config.num_k_heads_gdn,
            num_v_heads=config.num_v_heads_gdn,
            head_k_dim=config.head_k_dim_gdn,
            head_v_dim=config.head_v_dim_gdn,
            dtype_bytes=dtype_bytes,
        )
    return UnitBytes(
        kv_per_token=kv + draft.kv_per_token + draft.kv_values_per_token * dtype_bytes,
        gdn_per_slot=num_gdn * (ring + state) + draft.rows_per_request * scratch,
        draft_per_slot=draft.values_per_slot * dtype_bytes,
        sampling_per_slot=sampling_slot_bytes,
        verify_scratch_per_row=scratch,
    )


def plan_memory(
    units: UnitBytes,
    fixed: FixedBytes,
    *,
    free_bytes: int,
    memory_ratio: float,
    num_slots: int,
    page_size: int,
    wanted_pages: int,
    min_pages: int,
) -> MemoryPlan:
    """Pages that fit beside everything else, at most `wanted_pages`.

    Raises:
        ValueError: fewer than `min_pages` fit; the message has the numbers and the flags.
    """
    budget = int(free_bytes * memory_ratio)
    page_bytes = page_size * units.kv_per_token
    left = budget - fixed.total - (1 + num_slots) * units.per_slot - page_bytes
    num_pages = wanted_pages if page_bytes == 0 else min(wanted_pages, max(left, 0) // page_bytes)
    is_fit = num_pages >= min_pages and (page_bytes > 0 or left >= 0)
    plan = MemoryPlan(
        free_bytes=free_bytes,
        budget_bytes=budget,
        fixed=fixed,
        units=units,
        page_size=page_size,
        num_pages=num_pages if is_fit else min_pages,
        num_slots=num_slots,
    )
    if not is_fit:
        raise ValueError(
            f"the model does not fit: {show_parts(plan)} are {show(plan.used_bytes)}, and "
            f"{show(budget)} may be used ({memory_ratio:g} of {show(free_bytes)} free); lower "
            f"--max-running-requests (slots, sampling, graphs), --max-prefill-tokens "
            f"(activations, sampling), --max-model-len, --max-kv-tokens or --page-size (pages), "
            f"or raise --memory-ratio"
        )
    return plan


def describe_memory(plan: MemoryPlan) -> str:
    """One line for the log: every part, their sum and the budget."""
    return (
        f"memory: {show_parts(plan)}; {show(plan.used_bytes)} of {show(plan.budget_bytes)} "
        f"planned, {show(plan.free_bytes)} free"
    )


def show_parts(plan: MemoryPlan) -> str:
    """The parts that are not empty, by name."""
    names = {
        "slots": f"{plan.num_slots} slots",
        "pages": f"{plan.num_pages} KV pages of {plan.page_size} tokens",
    }
    parts = plan.parts.items()
    return ", ".join(f"{names.get(name, name)} {show(size)}" for name, size in parts if size)


def show(num_bytes: int) -> str:
    """Bytes for people, in KiB, MiB or GiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
