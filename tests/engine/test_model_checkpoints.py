"""Tensor names of every family: all layouts load alike, and each wrong tensor is named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engine.attention.paged import TORCH_PAGED
from engine.cache.pools import allocate_pools
from engine.loader import fill_dummy, load_weights
from engine.model_config import load_model_config
from engine.models.build import build_model, plan_weights
from graphs.kernels.kernel_set import TORCH_KERNELS
from tests.engine.model_driver import CPU, ModelDriver, empty_model
from tests.oracle.tiny_models import (
    CASES_BY_FAMILY,
    MOE_CASES,
    NEXT_CASES,
    TinyCase,
    build_oracle,
    save_stacked,
)

GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
FIRST_CASES = [(family, cases[0]) for family, cases in CASES_BY_FAMILY.items()]
META = torch.device("meta")


def loaded_parameters(folder: Path) -> dict[str, Tensor]:
    model, _ = empty_model(load_model_config(folder))
    load_weights(folder, partial(plan_weights, model), CPU, progress=False)
    return dict(model.named_parameters())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", sorted(path.name for path in GEOMETRIES.iterdir()))
def test_real_geometries_have_the_names_and_shapes_of_transformers(name: str) -> None:
    """E1: every tensor of six real models, without their weights.

    Oracle: the state dict of transformers' model of the same config.
    """
    folder = GEOMETRIES / name
    oracle_config = AutoConfig.from_pretrained(folder)
    is_nested = "text_config" in oracle_config.to_dict()
    oracle_type: Any = AutoModelForImageTextToText if is_nested else AutoModelForCausalLM
    with META:
        oracle = oracle_type.from_config(oracle_config, dtype=torch.bfloat16)
    expected = {
        tensor_name: tuple(tensor.shape)
        for tensor_name, tensor in oracle.state_dict().items()
        if not tensor_name.startswith("model.visual.")
    }
    config = load_model_config(folder)
    if config.tie_word_embeddings:
        del expected["lm_head.weight"]
    pools = allocate_pools(
        config,
        num_pages=1,
        page_size=16,
        num_slots=1,
        dtype=torch.bfloat16,
        state_dtype=torch.float32,
        device=META,
    )
    model = build_model(config, pools, TORCH_PAGED, TORCH_KERNELS, torch.bfloat16, META)
    plan = plan_weights(model, expected.keys())
    assert {tensor_name: slot.shape for tensor_name, slot in plan.slots.items()} == expected
    num_planned = sum(slot.destination.numel() for slot in plan.slots.values())
    assert num_planned == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3_5_moe_text", MOE_CASES[0]),
        ("qwen3_5_moe", MOE_CASES[1]),
        ("qwen3_next", NEXT_CASES[1]),
    ],
    ids=["qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next"],
)
def test_stacked_and_single_experts_load_alike(family: str, case: TinyCase, tmp_path: Path) -> None:
    """E1: oracle: the other layout of the same weights."""
    oracle = build_oracle(family, case)
    single, stacked = tmp_path / "single", tmp_path / "stacked"
    stacked.mkdir()
    oracle.save_pretrained(single)
    save_stacked(oracle, stacked)
    for folder, is_stacked in ((single, False), (stacked, True)):
        names = load_file(folder / "model.safetensors")
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in names) is is_stacked
    assert_same(loaded_parameters(single), loaded_parameters(stacked))


def test_nested_and_flat_checkpoints_load_alike(tmp_path: Path) -> None:
    """E1: oracle: the nested checkpoint's tensors under the flat names."""
    case = CASES_BY_FAMILY["qwen3_5"][0]
    build_oracle("qwen3_5", case).save_pretrained(tmp_path / "nested")
    build_oracle("qwen3_5_text", case, seed=1).save_pretrained(tmp_path / "flat")
    tensors = load_file(tmp_path / "nested" / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    renamed = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.visual.")
    }
    # A multi-token-prediction layer, which this model does not run, is no surprise.
    rewrite(tmp_path / "flat", renamed | {"mtp.fc.weight": torch.zeros(2, 4)})
    assert_same(loaded_parameters(tmp_path / "nested"), loaded_parameters(tmp_path / "flat"))


@pytest.mark.parametrize(("family", "case"), FIRST_CASES, ids=list(CASES_BY_FAMILY))
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_every_tensor_is_required_and_checked(
    family: str, case: TinyCase, damage: str, tmp_path: Path
) -> None:
    """E1: oracle: for each tensor in turn, its own name in the message."""
    build_oracle(family, case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.visual."):
            continue
        changed = tensors | {name: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])}
        if damage == "missing":
            del changed[name]
        rewrite(tmp_path, changed)
        with pytest.raises(ValueError, match=r"model\.safetensors|lacks") as caught:
            loaded_parameters(tmp_path)
        assert name in str(caught.value)


@pytest.mark.parametrize(("family", "case"), FIRST_CASES, ids=list(CASES_BY_FAMILY))
def test_an_unknown_tensor_is_named(family: str, case: TinyCase, tmp_path: Path) -> None:
    """E1: oracle: the added name."""
    build_oracle(family, case).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {"model.layers.0.adapter.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unexpected 1 tensor: model\.layers\.0\.adapter\.weight"):
        loaded_parameters(tmp_path)


@pytest.mark.parametrize(("family", "case"), FIRST_CASES, ids=list(CASES_BY_FAMILY))
def test_dummy_weights_run(family: str, case: TinyCase, tmp_path: Path) -> None:
    """E1: weights from a config alone.

    Oracle: every logit is finite, so no parameter is left as it was allocated.
    """
    build_oracle(family, case).save_pretrained(tmp_path)
    driver = ModelDriver(tmp_path)
    for parameter in driver.model.parameters():
        parameter.fill_(torch.nan)
    fill_dummy(driver.model.parameters(), seed=0)
    (logits,) = driver.prefill([(driver.start(range(70)), 70)])
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 1e-3
