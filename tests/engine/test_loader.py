"""Loading safetensors: what is written comes back."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.loader import fill_dummy, load_weights
from engine.models.weights import WeightPlan, WeightSlot
from tests.engine.tiny_checkpoint import (
    CPU,
    EMBED,
    NORM,
    TinyModel,
    Write,
    assert_loaded,
    make_tensors,
    write_index,
    write_sharded,
    write_single,
)


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_loads_what_was_written(prefix: str, write: Write, tmp_path: Path) -> None:
    """E1: one file or shards, either prefix; towers and mtp are left alone.

    Oracle: the tensors that were saved.
    """
    tensors = make_tensors(prefix)
    others = {"model.visual.patch.weight": torch.ones(2, dtype=torch.int8), "mtp.fc": torch.ones(1)}
    model = TinyModel()
    model.load(write(tmp_path, tensors | others))
    assert_loaded(model, tensors, prefix)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_converts_dtypes(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    """E1: oracle: torch's own conversion of the saved tensors."""
    tensors = make_tensors(dtype=stored)
    model = TinyModel(dtype=wanted)
    model.load(write_single(tmp_path, tensors))
    assert_loaded(model, tensors, "model.")


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """E1: oracle: the tensors of model.safetensors, as transformers chooses."""
    tensors = make_tensors()
    write_single(tmp_path, tensors)
    write_index(tmp_path, {"gone": "gone.safetensors"})
    model = TinyModel()
    model.load(tmp_path)
    assert_loaded(model, tensors, "model.")


def test_shards_may_be_links(tmp_path: Path) -> None:
    """E1: oracle: the saved tensors; download caches link every file into a blob folder."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    tensors = make_tensors()
    write_sharded(blobs, tensors)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    model = TinyModel()
    model.load(folder)
    assert_loaded(model, tensors, "model.")


def test_nan_weights_are_loaded(tmp_path: Path) -> None:
    """E1: oracle: the saved tensor; values are nobody's business here."""
    tensors = make_tensors()
    tensors["model." + NORM][1] = torch.nan
    model = TinyModel()
    model.load(write_single(tmp_path, tensors))
    assert model.norm.isnan().tolist() == [False, True, False, False]


def test_tied_head_may_be_absent(tmp_path: Path) -> None:
    """E1: oracle: the saved embedding."""
    tensors = make_tensors()
    del tensors["lm_head.weight"]
    model = TinyModel(is_tied=True)
    model.load(write_single(tmp_path, tensors))
    assert_loaded(model, tensors, "model.")


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_tied_head_may_be_a_copy(write: Write, tmp_path: Path) -> None:
    """E1: oracle: the saved embedding; a NaN in both is no difference."""
    tensors = make_tensors()
    tensors["model." + EMBED][2, 2] = torch.nan
    tensors["lm_head.weight"] = tensors["model." + EMBED].clone()
    model = TinyModel(is_tied=True)
    model.load(write(tmp_path, tensors))
    assert torch.equal(model.embed.nan_to_num(9.0), tensors["model." + EMBED].nan_to_num(9.0))


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """E1: oracle: weak references; no earlier tensor is alive when the next one is placed."""
    seen: list[weakref.ref[Tensor]] = []
    model = TinyModel()

    def track(tensor: Tensor) -> Tensor:
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(tensor))
        return tensor.view(-1)

    def plan_weights(names: Collection[str]) -> WeightPlan:
        plan = model.plan_weights(names)
        slots = {
            name: WeightSlot(torch.empty(slot.destination.numel()), slot.shape, track)
            for name, slot in plan.slots.items()
        }
        return WeightPlan(slots)

    load_weights(write_sharded(tmp_path, make_tensors()), plan_weights, CPU, progress=False)
    assert len(seen) == 6


def test_progress_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S1: oracle: 384 bytes of float32 on stderr with progress, nothing without."""
    write_single(tmp_path, make_tensors())
    load_weights(tmp_path, TinyModel().plan_weights, CPU, progress=False)
    assert capsys.readouterr() == ("", "")
    load_weights(tmp_path, TinyModel().plan_weights, CPU, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "384/384" in shown.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights(dtype: torch.dtype) -> None:
    """E1: oracle: the moments of N(0, 0.02), and equality for equal seeds only."""
    first, second, other = (
        [torch.empty(200, 50, dtype=dtype), torch.empty(7, dtype=torch.float32)] for _ in range(3)
    )
    fill_dummy(first, seed=1)
    fill_dummy(second, seed=1)
    fill_dummy(other, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    # 10,000 draws: five standard errors of the mean and of the deviation.
    assert abs(first[0].float().mean()) < 5 * 0.02 / 100
    assert abs(first[0].float().std() - 0.02) < 5 * 0.02 / 141
