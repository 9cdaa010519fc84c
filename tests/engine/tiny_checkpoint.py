"""A checkpoint of six small tensors, and the model that takes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.loader import load_weights
from engine.models.weights import WeightPlan, WeightSlot

Write = Callable[[Path, Mapping[str, Tensor]], Path]
CPU = torch.device("cpu")
EMBED, CONV = "embed_tokens.weight", "layers.0.conv1d.weight"
Q, K, NORM = "layers.0.q_proj.weight", "layers.0.k_proj.weight", "norm.weight"


class TinyModel:
    """A few parameters with everything a plan can ask for: fused rows, a layout, a tied head."""

    def __init__(self, *, is_tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        self.is_tied = is_tied
        self.embed = torch.full((6, 4), torch.nan, dtype=dtype)
        self.qk = torch.full((5, 4), torch.nan, dtype=dtype)
        self.conv = torch.full((8, 3), torch.nan, dtype=dtype)
        self.norm = torch.full((4,), torch.nan, dtype=dtype)
        self.head = self.embed if is_tied else torch.full((6, 4), torch.nan, dtype=dtype)

    def plan_weights(self, names: Collection[str]) -> WeightPlan:
        nested = any(name.startswith("model.language_model.") for name in names)
        prefix = "model.language_model." if nested else "model."
        slots = {
            prefix + EMBED: WeightSlot(self.embed, (6, 4)),
            prefix + Q: WeightSlot(self.qk[:3], (3, 4)),
            prefix + K: WeightSlot(self.qk[3:], (2, 4)),
            prefix + CONV: WeightSlot(self.conv, (8, 1, 3), lambda weight: weight.squeeze(1)),
            prefix + NORM: WeightSlot(self.norm, (4,)),
        }
        if not self.is_tied:
            slots["lm_head.weight"] = WeightSlot(self.head, (6, 4))
        return WeightPlan(
            slots=slots,
            skipped_prefixes=("model.visual.",),
            kept_prefixes=("mtp.",),
            tied=(("lm_head.weight", prefix + EMBED),) if self.is_tied else (),
        )

    def load(self, folder: Path) -> None:
        load_weights(folder, self.plan_weights, CPU, progress=False)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.embed, self.qk, self.conv, self.norm, self.head]

    @property
    def is_untouched(self) -> bool:
        return all(bool(parameter.isnan().all()) for parameter in self.parameters)


def make_tensors(prefix: str = "model.", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {
        prefix + EMBED: (6, 4),
        prefix + Q: (3, 4),
        prefix + K: (2, 4),
        prefix + CONV: (8, 1, 3),
        prefix + NORM: (4,),
        "lm_head.weight": (6, 4),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def write_single(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Three shards, and the index that names them."""
    weight_map = {}
    for shard in range(3):
        file_name = f"model-{shard + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::3]}
        save_file(part, folder / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def read_index(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = content["weight_map"]
    return weight_map


def assert_loaded(model: TinyModel, tensors: Mapping[str, Tensor], prefix: str) -> None:
    dtype = model.embed.dtype
    assert torch.equal(model.embed, tensors[prefix + EMBED].to(dtype))
    assert torch.equal(model.qk, torch.cat([tensors[prefix + Q], tensors[prefix + K]]).to(dtype))
    assert torch.equal(model.conv, tensors[prefix + CONV][:, 0].to(dtype))
    assert torch.equal(model.norm, tensors[prefix + NORM].to(dtype))
    if not model.is_tied:
        assert torch.equal(model.head, tensors["lm_head.weight"].to(dtype))
