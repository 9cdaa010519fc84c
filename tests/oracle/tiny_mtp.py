"""Tiny random checkpoints that have a multi-token-prediction layer, for every family."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle.tiny_models import TinyCase, build_oracle, save_stacked

ATTENTION = "self_attn.q_proj.weight"
EXPERTS = "mtp.layers.0.mlp.experts."


def save_with_mtp(
    family: str, case: TinyCase, folder: Path, *, is_stacked: bool = False, seed: int = 0
) -> None:
    """A target of `build_oracle` with `mtp.*` beside it, in fp32.

    `is_stacked`: the experts of a layer in one tensor, those of the MTP layer too. The weights
    are the same either way.
    """
    model = build_oracle(family, case, seed)
    mtp = random_mtp(model.state_dict(), case.hidden, seed)
    if is_stacked:
        save_stacked(model, folder)
    else:
        model.save_pretrained(folder)
        mtp = split_experts(mtp)
    weights_path, config_path = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(weights_path) | mtp, weights_path, metadata={"format": "pt"})
    config = json.loads(config_path.read_text())
    config["architectures"] = [type(model).__name__]
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    config_path.write_text(json.dumps(config))


def random_mtp(target: Mapping[str, Tensor], hidden: int, seed: int) -> dict[str, Tensor]:
    """`mtp.*`, its layer shaped as the target's last one with full attention."""
    last = max(
        (name.removesuffix(ATTENTION) for name in target if name.endswith(ATTENTION)),
        key=lambda prefix: int(prefix.rstrip(".").rsplit(".", 1)[1]),
    )
    shapes = {
        f"mtp.layers.0.{name.removeprefix(last)}": tensor.shape
        for name, tensor in target.items()
        if name.startswith(last)
    }
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = torch.Size([hidden])
    generator = torch.Generator().manual_seed(seed + 1)
    return {name: random_weight(shape, generator) for name, shape in shapes.items()}


def split_experts(mtp: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts under a name for each; other tensors as they are."""
    tensors = {name: tensor for name, tensor in mtp.items() if not name.startswith(EXPERTS)}
    for expert, gate_up in enumerate(mtp.get(f"{EXPERTS}gate_up_proj", ())):
        gate, up = gate_up.chunk(2)
        tensors[f"{EXPERTS}{expert}.gate_proj.weight"] = gate.contiguous()
        tensors[f"{EXPERTS}{expert}.up_proj.weight"] = up.contiguous()
    for expert, down in enumerate(mtp.get(f"{EXPERTS}down_proj", ())):
        tensors[f"{EXPERTS}{expert}.down_proj.weight"] = down.contiguous()
    return tensors


def random_weight(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Matrices that keep a deviation of 1; norm weights, which are zero-centred, near 0."""
    std = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator) * std
