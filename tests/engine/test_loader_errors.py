"""Checkpoints that are wrong: each is refused with a line that names what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.tiny_checkpoint import (
    CONV,
    EMBED,
    NORM,
    Q,
    TinyModel,
    Write,
    make_tensors,
    read_index,
    write_index,
    write_sharded,
    write_single,
)

Break = Callable[[dict[str, Tensor]], str]


@pytest.mark.parametrize("change", ["value", "shape"])
def test_tied_head_that_differs_is_refused(change: str, tmp_path: Path) -> None:
    """E1: oracle: both names in the message, nothing loaded."""
    tensors = make_tensors()
    head = tensors["model." + EMBED].clone()
    head[5, 3] += 1e-3
    tensors["lm_head.weight"] = head if change == "value" else head[:5].contiguous()
    model = TinyModel(is_tied=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        model.load(write_single(tmp_path, tensors))
    assert model.is_untouched


def break_missing(tensors: dict[str, Tensor]) -> str:
    del tensors["model." + NORM]
    return "lacks 1 tensor: model.norm.weight"


def break_many_missing(tensors: dict[str, Tensor]) -> str:
    for name in sorted(tensors):
        if name != "lm_head.weight":
            del tensors[name]
    return "lacks 5 tensors: model.embed_tokens.weight, "


def break_extra(tensors: dict[str, Tensor]) -> str:
    for index in range(7):
        tensors[f"model.layers.9.x{index}"] = torch.zeros(1)
    return "holds unexpected 7 tensors: model.layers.9.x0, model.layers.9.x1, "


def break_unprintable(tensors: dict[str, Tensor]) -> str:
    tensors["model.a\nb\x1b[2J"] = torch.zeros(1)
    return r"unexpected 1 tensor: 'model.a\nb\x1b[2J'"


def break_renamed(tensors: dict[str, Tensor]) -> str:
    tensors["model.final_norm.weight"] = tensors.pop("model." + NORM)
    return "norm.weight; holds unexpected 1 tensor: model.final_norm.weight"


def break_shape(tensors: dict[str, Tensor]) -> str:
    tensors["model." + CONV] = torch.zeros(8, 1, 4)
    return "model.layers.0.conv1d.weight has shape [8, 1, 4], expected [8, 1, 3]"


def break_rank(tensors: dict[str, Tensor]) -> str:
    tensors["model." + NORM] = torch.tensor(1.0)
    return "model.norm.weight has shape [], expected [4]"


def break_int8(tensors: dict[str, Tensor]) -> str:
    tensors["model." + Q] = torch.zeros(3, 4, dtype=torch.int8)
    return "model.layers.0.q_proj.weight has dtype I8; quantized checkpoints are not supported yet"


def break_fp8(tensors: dict[str, Tensor]) -> str:
    tensors["model." + Q] = torch.zeros(3, 4).to(torch.float8_e4m3fn)
    tensors["model." + Q + "_scale_inv"] = torch.ones(1)
    return "model.layers.0.q_proj.weight has dtype F8_E4M3; quantized"


@pytest.mark.parametrize("write", [write_single, write_sharded])
@pytest.mark.parametrize(
    "change",
    [
        break_missing,
        break_many_missing,
        break_extra,
        break_unprintable,
        break_renamed,
        break_shape,
        break_rank,
        break_int8,
        break_fp8,
    ],
)
def test_wrong_tensors_are_named_before_anything_is_loaded(
    change: Break, write: Write, tmp_path: Path
) -> None:
    """E1: oracle: the name in a one-line message, and parameters that are still NaN."""
    tensors = make_tensors()
    expected = change(tensors)
    model = TinyModel()
    with pytest.raises(ValueError, match=tmp_path.name) as caught:
        model.load(write(tmp_path, tensors))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert model.is_untouched


def test_names_shown_are_bounded(tmp_path: Path) -> None:
    """E1: oracle: five names of seven, and the count of the rest."""
    tensors = make_tensors()
    break_extra(tensors)
    with pytest.raises(ValueError, match=r"x3, model\.layers\.9\.x4 and 2 more"):
        TinyModel().load(write_single(tmp_path, tensors))


@given(cut=st.floats(0, 1, exclude_max=True), sharded=st.booleans())
@settings(max_examples=60, deadline=None)
def test_truncated_files_are_refused(cut: float, sharded: bool) -> None:
    """E1: oracle: no prefix of a safetensors file is one; the message names the file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (write_sharded if sharded else write_single)(folder, make_tensors())
        file = sorted(folder.glob("*.safetensors"))[-1]
        content = file.read_bytes()
        file.write_bytes(content[: int(cut * len(content))])
        model = TinyModel()
        with pytest.raises(ValueError, match=file.name) as caught:
            model.load(folder)
        assert "\n" not in str(caught.value)
        assert model.is_untouched


@given(position=st.integers(0, 499), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_headers_never_crash(position: int, value: int) -> None:
    """E1: oracle: a changed header byte either still describes a whole model or is a ValueError."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_single(Path(name), make_tensors())
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[position] = value
        file.write_bytes(content)
        model = TinyModel()
        try:
            model.load(folder)
        except ValueError as error:
            assert "\n" not in str(error)
            assert model.is_untouched
        else:
            assert not any(bool(parameter.isnan().any()) for parameter in model.parameters)


@pytest.mark.parametrize(
    "file_name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "x\\..\\y.safetensors",
        "x\0.safetensors",
        "x.bin",
        "x.safetensors/",
    ],
)
def test_index_cannot_leave_the_folder(file_name: str, tmp_path: Path) -> None:
    """E1: oracle: the refused name in the message, though such a file exists outside."""
    folder = tmp_path / "inner"
    folder.mkdir()
    save_file(make_tensors(), tmp_path / "x.safetensors")
    write_index(folder, dict.fromkeys(make_tensors(), file_name))
    with pytest.raises(ValueError, match="plain name") as caught:
        TinyModel().load(folder)
    assert repr(file_name) in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    """E1: oracle: the removed file's name."""
    write_sharded(tmp_path, make_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors: no such file"):
        TinyModel().load(tmp_path)


def test_index_that_lists_too_much(tmp_path: Path) -> None:
    """E1: oracle: the tensor that only the index knows, and the file it should be in."""
    write_sharded(tmp_path, make_tensors())
    first = "model-00001-of-00003.safetensors"
    write_index(tmp_path, read_index(tmp_path) | {"model.more": first})
    with pytest.raises(ValueError, match=rf"{first}: lacks 1 tensor: model\.more"):
        TinyModel().load(tmp_path)


def test_index_that_lists_too_little(tmp_path: Path) -> None:
    """E1: oracle: the tensor that only the shard knows."""
    write_sharded(tmp_path, make_tensors())
    weight_map = read_index(tmp_path)
    file_name = weight_map.pop("model." + NORM)
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=rf"{file_name}.*does not list.*model\.norm\.weight"):
        TinyModel().load(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"metadata": {}}']
)
def test_broken_index_is_named(content: str, tmp_path: Path) -> None:
    """E1: oracle: the index file's name in a ValueError."""
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: "):
        TinyModel().load(tmp_path)


@pytest.mark.parametrize(
    ("file_name", "reason"),
    [
        ("pytorch_model.bin", "pickled"),
        ("consolidated.00.pth", "pickled"),
        ("README.md", "has neither model.safetensors nor"),
    ],
)
def test_folders_without_safetensors(file_name: str, reason: str, tmp_path: Path) -> None:
    """E1: oracle: the accepted names in the message."""
    (tmp_path / file_name).write_bytes(b"x")
    with pytest.raises(ValueError, match=reason) as caught:
        TinyModel().load(tmp_path)
    assert "model.safetensors.index.json" in str(caught.value)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    """E1: oracle: the path in the message."""
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        TinyModel().load(tmp_path / "nowhere")
