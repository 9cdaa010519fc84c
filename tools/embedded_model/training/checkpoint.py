"""Save and load a checkpoint: bfloat16 safetensors, an index, config.json."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.embedded_model.training.config import ModelConfig
from tools.embedded_model.training.model import Net

_MAX_SHARD_BYTES = 14 << 20
# The recurrence needs these in full precision.
_FLOAT32 = ("A_log", "dt_bias")


def save_checkpoint(net: Net, folder: Path, record: dict[str, Any]) -> None:
    """Write the weights, config.json and, as training.json, the record of the run."""
    tensors = {name: _stored(name, tensor) for name, tensor in net.state_dict().items()}
    shards = _shards(tensors)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(net.config.to_json(), indent=1))
    (folder / "training.json").write_text(json.dumps(record))


def load_weights(net: Net, folder: Path) -> None:
    """Load every *.safetensors file of a folder into a network of the same shape.

    Raises:
        RuntimeError: a tensor is missing, unknown or of another shape.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def load_net(folder: Path) -> Net:
    """Load a checkpoint for inference in float32."""
    config = ModelConfig.from_json(json.loads((folder / "config.json").read_text()))
    net = Net(config)
    load_weights(net, folder)
    return net.eval()


def _stored(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(_FLOAT32) else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split in order into parts of at most _MAX_SHARD_BYTES, or of one larger tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in tensors.items():
        if num_bytes + tensor.nbytes > _MAX_SHARD_BYTES and shards[-1]:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = tensor
        num_bytes += tensor.nbytes
    return shards
