"""V15, E6: the split of the memory budget, as arithmetic on real geometries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device_facts import DeviceFacts
from engine.memory import (
    DraftMemory,
    FixedBytes,
    MemoryPlan,
    UnitBytes,
    describe_memory,
    plan_memory,
    unit_bytes,
)
from engine.model_config import load_model_config
from engine.plan import make_plan
from engine.slot_tables import SlotTables, table_bytes
from engine.step_memory import StepLimits, StepSettings, fixed_bytes

GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
H200 = DeviceFacts(torch.device("cuda"), "H200", 149 * 10**9)
NUM_WEIGHTS = {"Qwen3.6-27B": 26_900_000_000, "Qwen3.6-35B-A3B": 34_700_000_000}
LIMITS = StepLimits(
    max_running_requests=64,
    max_prefill_tokens=8192,
    max_model_len=32768,
    page_size=64,
)
CUDA = StepSettings(torch.bfloat16, is_cuda=True, is_compiled=True, is_captured=True)
SMALL = FixedBytes(
    weights=1000, graphs=100, activations=50, sampling=20, tables=8, drafts=0, reserve=22
)
UNITS = UnitBytes(kv_per_token=10, gdn_per_slot=70, sampling_per_slot=30)


def plan_of(name: str, draft: DraftMemory | None = None, **options: object) -> MemoryPlan:
    """The memory plan of a real geometry on one H200."""
    config = EngineConfig(**options)  # type: ignore[arg-type]
    model = load_model_config(GEOMETRIES / name)
    return make_plan(config, model, H200, NUM_WEIGHTS[name], draft or DraftMemory()).memory


@pytest.mark.parametrize(
    ("name", "kv", "ring", "state"),
    [
        # 16 layers, k and v, 4 heads of 256; 48 layers of [4, 2 * 16 * 128 + 48 * 128] and
        # [48, 128, 128] fp32.
        ("Qwen3.6-27B", 16 * 2 * 4 * 256 * 2, 48 * 4 * 10240 * 2, 48 * 48 * 128 * 128 * 4),
        ("Qwen3.6-35B-A3B", 10 * 2 * 2 * 256 * 2, 30 * 4 * 8192 * 2, 30 * 32 * 128 * 128 * 4),
        ("Qwen3-Next-80B-A3B", 12 * 2 * 2 * 256 * 2, 36 * 4 * 8192 * 2, 36 * 32 * 128 * 128 * 4),
        ("Qwen3.5-0.8B", 6 * 2 * 2 * 256 * 2, 18 * 4 * 6144 * 2, 18 * 16 * 128 * 128 * 4),
    ],
)
def test_unit_bytes_of_real_models(name: str, kv: int, ring: int, state: int) -> None:
    """E6: bf16, states in fp32. Oracle: by hand from config.json; 27B is 65,536 B a token and
    151 MB of state a request (facts/models.md)."""
    model = load_model_config(GEOMETRIES / name)
    units = unit_bytes(model, dtype_bytes=2, state_dtype_bytes=4, sampling_slot_bytes=7)
    assert units == UnitBytes(kv_per_token=kv, gdn_per_slot=ring + state, sampling_per_slot=7)
    if name == "Qwen3.6-27B":
        assert (kv, state) == (65_536, 150_994_944)


def test_drafts_come_out_of_the_budget() -> None:
    """V15: fixed bytes, draft KV per target token, the verify scratch, k + 1 logit rows.

    Oracle: the plan without drafts, what the method declares, and by hand from config.json what a
    row leaves in 48 layers: bf16 conv inputs, keys and values, fp32 decay and strength of 48 heads.
    """
    draft = DraftMemory(fixed_bytes=10**9, kv_per_token=4096, rows_per_request=4)
    plain, with_drafts = plan_of("Qwen3.6-27B"), plan_of("Qwen3.6-27B", draft)
    assert with_drafts.units.kv_per_token == plain.units.kv_per_token + 4096
    scratch = 48 * (2 * (10240 + 2048 + 6144) + 4 * 2 * 48)
    assert with_drafts.units.verify_scratch_per_row == scratch
    assert plain.units.verify_scratch_per_row == 0
    assert with_drafts.slot_bytes - plain.slot_bytes == 65 * 4 * scratch
    # At k = 3 a running request takes at most 5% more than its state.
    assert 4 * scratch <= 0.05 * plain.units.gdn_per_slot
    assert with_drafts.fixed.drafts == 10**9
    logit_rows = 64 * 3 * 248320
    assert with_drafts.fixed.sampling - plain.fixed.sampling >= logit_rows * 2
    assert with_drafts.fixed.graphs - plain.fixed.graphs >= logit_rows * 2
    assert with_drafts.num_pages < plain.num_pages
    assert with_drafts.used_bytes <= with_drafts.budget_bytes


@pytest.mark.parametrize("name", sorted(NUM_WEIGHTS))
@pytest.mark.parametrize("max_running_requests", [1, 7, 64, 200])
@pytest.mark.parametrize("memory_ratio", [0.75, 0.9])
def test_no_byte_is_spent_twice(name: str, max_running_requests: int, memory_ratio: float) -> None:
    """E6: the parts fit, and one more page would not. Oracle: their sum."""
    plan = plan_of(
        name,
        max_running_requests=max_running_requests,
        memory_ratio=memory_ratio,
        max_model_len=256,
    )
    assert plan.budget_bytes == int(H200.free_bytes * memory_ratio)
    parts = plan.parts
    assert parts["weights"] == 2 * NUM_WEIGHTS[name]
    assert parts["slots"] == (1 + max_running_requests) * plan.units.per_slot
    assert parts["pages"] == (1 + plan.num_pages) * 64 * plan.units.kv_per_token
    assert plan.used_bytes == sum(parts.values()) <= plan.budget_bytes
    assert plan.num_pages <= max_running_requests * 4
    full = plan_of(name, max_running_requests=max_running_requests, memory_ratio=memory_ratio)
    assert full.budget_bytes - full.used_bytes < full.page_bytes or (
        full.num_pages == max_running_requests * 262144 // 64
    )


def test_pages_follow_every_flag() -> None:
    """E6: more of anything else leaves fewer pages. Oracle: the order of the results."""

    def pages(**options: object) -> int:
        return plan_of("Qwen3.6-27B", **options).num_pages

    requests = [pages(max_running_requests=count) for count in (16, 32, 64, 128, 256)]
    assert requests == sorted(set(requests), reverse=True)
    chunks = [pages(max_prefill_tokens=count) for count in (512, 2048, 4096, 8192, 16384)]
    assert chunks == sorted(set(chunks), reverse=True)
    ratios = [pages(memory_ratio=ratio) for ratio in (0.7, 0.8, 0.9, 1.0)]
    assert ratios == sorted(set(ratios))
    assert pages(cuda_graphs="off") > pages()
    assert pages(state_dtype="bfloat16") > pages()
    assert pages(max_kv_tokens=64000) == 1000
    assert pages(max_model_len=1024) == 64 * 16


@pytest.mark.parametrize("name", ["Qwen3.6-27B", "Qwen3.6-35B-A3B"])
def test_fixed_parts_only_grow(name: str) -> None:
    """E6: no limit that is raised makes a part smaller. Oracle: the parts in order."""
    model = load_model_config(GEOMETRIES / name)

    def parts(**changes: int) -> FixedBytes:
        return fixed_bytes(model, replace(LIMITS, **changes), CUDA, num_weights=1)

    ranges = {
        "max_running_requests": range(1, 300, 3),
        "max_prefill_tokens": range(64, 1024, 16),
        "max_model_len": range(64, 65536, 4096),
    }
    for field, values in ranges.items():
        series = [parts(**{field: value}) for value in values]
        for part in ("graphs", "activations", "sampling", "tables"):
            sizes = [getattr(fixed, part) for fixed in series]
            assert sizes == sorted(sizes), (field, part)


def test_parts_of_other_devices() -> None:
    """E6: no graphs and no reserve on the CPU. Oracle: their meaning."""
    model = load_model_config(EMBEDDED)
    cpu = StepSettings(torch.float32, is_cuda=False, is_compiled=True, is_captured=False)
    fixed = fixed_bytes(model, replace(LIMITS, max_prefill_tokens=512), cpu, num_weights=12)
    assert (fixed.weights, fixed.graphs, fixed.reserve, fixed.drafts) == (48, 0, 0, 0)
    # 64 + 64 rows of logits and 4 hidden, 74 bytes a logit of 64 rows
    assert fixed.sampling == 128 * (8192 + 4 * 256) * 4 + 64 * 8192 * 74


def test_the_embedded_model_gets_all_its_pages() -> None:
    """S1: 64 requests of 4,096 tokens with 4 GiB free. Oracle: by hand."""
    facts = DeviceFacts(torch.device("cpu"), "cpu", 2**32)
    plan = make_plan(EngineConfig(), load_model_config(EMBEDDED), facts, num_weights=12_000_000)
    assert plan.memory.num_pages == 64 * 4096 // 64
    assert plan.limits.max_model_len == 4096


def test_the_plan_by_hand() -> None:
    """E6: 1200 fixed, 1 + 2 slots of 100, 1 + n pages of 40. Oracle: written out."""
    plan = plan_memory(
        UNITS,
        SMALL,
        free_bytes=4000,
        memory_ratio=0.5,
        num_slots=2,
        page_size=4,
        wanted_pages=100,
        min_pages=1,
    )
    assert (plan.budget_bytes, plan.num_pages, plan.used_bytes) == (2000, 11, 1980)
    assert plan.parts == {
        "weights": 1000,
        "graphs": 100,
        "activations": 50,
        "sampling": 20,
        "tables": 8,
        "drafts": 0,
        "reserve": 22,
        "slots": 300,
        "pages": 480,
    }
    line = describe_memory(plan)
    assert line.startswith("memory: weights 1.0 KiB, graphs 0.1 KiB")
    assert "2 slots 0.3 KiB, 11 KV pages of 4 tokens 0.5 KiB; 1.9 KiB of 2.0 KiB planned" in line
    assert "\n" not in line and "drafts" not in line


def test_a_plan_that_does_not_fit_says_why() -> None:
    """E6: one line with every part's number and the flags. Oracle: the plan's own parts."""
    model = load_model_config(GEOMETRIES / "Qwen3.6-27B")
    facts = replace(H200, free_bytes=60 * 10**9)
    with pytest.raises(ValueError) as refusal:
        make_plan(EngineConfig(max_model_len=4096), model, facts, NUM_WEIGHTS["Qwen3.6-27B"])
    message = str(refusal.value)
    assert "\n" not in message
    for part in ("weights 50.11 GiB", "graphs", "activations", "sampling", "reserve 1.00 GiB"):
        assert part in message
    for words in ("64 slots 9.45 GiB", "64 KV pages of 64 tokens 260.0 MiB", "0.9 of 55.88 GiB"):
        assert words in message
    for flag in (
        "--memory-ratio",
        "--max-running-requests",
        "--max-model-len",
        "--max-prefill-tokens",
        "--max-kv-tokens",
        "--page-size",
    ):
        assert flag in message


def test_a_model_without_attention_is_refused_too() -> None:
    """E6: no pages to leave out, and still too large. Oracle: the numbers."""
    units = replace(UNITS, kv_per_token=0)
    sizes = {"memory_ratio": 1.0, "num_slots": 2, "page_size": 4, "wanted_pages": 5, "min_pages": 1}
    assert plan_memory(units, SMALL, free_bytes=1500, **sizes).num_pages == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not fit"):
        plan_memory(units, SMALL, free_bytes=1499, **sizes)  # type: ignore[arg-type]


def test_tables_are_what_the_device_holds() -> None:
    """E6: Oracle: the tensors themselves."""
    tables = SlotTables(5, 9, torch.device("meta"))
    assert table_bytes(5, 9) == tables.page_table.nbytes + tables.last_tokens.nbytes
    model = load_model_config(EMBEDDED)
    assert fixed_bytes(model, LIMITS, CUDA, num_weights=1).tables == table_bytes(64, 512 + 2)
