"""E2, E5: what the plan decides by device, and the shapes it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.device_facts import DeviceFacts
from engine.model_config import ModelConfig, load_model_config
from engine.plan import Plan, make_plan

FOLDER = Path(__file__).parents[2] / "bench" / "geometries" / "Qwen3.5-0.8B"
CPU = DeviceFacts(torch.device("cpu"), "cpu", 2**36)
CUDA = DeviceFacts(torch.device("cuda"), "some GPU", 2**36)


def plan_for(facts: DeviceFacts, model: ModelConfig | None = None, **options: str) -> Plan:
    config = EngineConfig(model_path=str(FOLDER), max_running_requests=2, **options)
    return make_plan(config, model or load_model_config(FOLDER), facts, num_weights=10**6)


@pytest.mark.parametrize(
    ("facts", "wanted", "is_compiled"),
    [
        (CPU, "auto", True),
        (CUDA, "auto", True),
        (CPU, "off", False),
        (CUDA, "off", False),
    ],
)
def test_compile_by_device(facts: DeviceFacts, wanted: str, is_compiled: bool) -> None:
    """E5: auto compiles. Oracle: the table above."""
    assert plan_for(facts, compile=wanted).is_compiled is is_compiled


@pytest.mark.parametrize(
    ("facts", "options", "is_captured"),
    [
        (CPU, {}, False),
        (CPU, {"cuda_graphs": "off"}, False),
        (CUDA, {}, True),
        (CUDA, {"cuda_graphs": "on"}, True),
        (CUDA, {"cuda_graphs": "off"}, False),
        (CUDA, {"attention_backend": "torch"}, False),
    ],
)
def test_capture_by_device(facts: DeviceFacts, options: dict[str, str], is_captured: bool) -> None:
    """E5: auto captures where steps can be captured; graphs that are not made take no memory.

    Oracle: the table above.
    """
    plan = plan_for(facts, **options)
    assert plan.is_captured is is_captured
    assert (plan.memory.fixed.graphs > 0) is is_captured


@pytest.mark.parametrize(
    ("facts", "backend"), [(CPU, "auto"), (CUDA, "torch")], ids=["cpu", "torch attention"]
)
def test_graphs_are_refused_where_there_are_none(facts: DeviceFacts, backend: str) -> None:
    """E5: one line that names the flag. Oracle: the message."""
    with pytest.raises(ValueError, match="--cuda-graphs on needs a CUDA device"):
        plan_for(facts, cuda_graphs="on", attention_backend=backend)


@pytest.mark.parametrize(
    ("facts", "wanted", "backend"),
    [
        (CPU, "auto", "torch"),
        (CUDA, "auto", "triton"),
        (CUDA, "torch", "torch"),
        (CUDA, "triton", "triton"),
    ],
)
def test_attention_backend_by_device(facts: DeviceFacts, wanted: str, backend: str) -> None:
    """E2: auto takes our kernels where they run. Oracle: the table above."""
    assert plan_for(facts, attention_backend=wanted).decode_backend == backend


def test_triton_attention_is_refused_on_the_cpu() -> None:
    """E2: one line that names the flag. Oracle: the message."""
    with pytest.raises(ValueError, match="--attention-backend triton needs a CUDA device"):
        plan_for(CPU, attention_backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 512}, "head_dim 512: on cuda"),
        ({"head_dim": 40}, "head_dim 40: on cuda"),
        ({"num_q_heads": 34, "num_kv_heads": 2}, "num_attention_heads is 17 times"),
        ({"head_k_dim_gdn": 512}, "linear_key_head_dim 512"),
        ({"head_v_dim_gdn": 8}, "linear_value_head_dim 8"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(changes: dict[str, int], message: str) -> None:
    """E2: at start on CUDA, not by the first request; the CPU takes them. Oracle: the message."""
    model = replace(load_model_config(FOLDER), **changes)
    with pytest.raises(ValueError, match=message):
        plan_for(CUDA, model)
    plan_for(CPU, model)


def test_torch_attention_takes_any_head() -> None:
    """E2: the way out that the message names. Oracle: no refusal."""
    model = replace(load_model_config(FOLDER), head_dim=512)
    plan_for(CUDA, model, attention_backend="torch")
