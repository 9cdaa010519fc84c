"""Safetensors files into the tensors of a model: headers checked first, then shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.json_file import read_json_file
from engine.models.weights import WeightPlan, WeightSlot

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 * 2**20
MAX_NAMES_SHOWN = 5
MAX_NAME_CHARS = 200
ROWS_PER_COMPARISON = 4096
DUMMY_STD = 0.02
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"F32": 4, "BF16": 2, "F16": 2})


@dataclass(frozen=True)
class TensorHeader:
    """What a file says about one of its tensors; `dtype` in the file's notation."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class ShardIndex(msgspec.Struct, frozen=True):
    """model.safetensors.index.json: tensor name -> file name."""

    weight_map: dict[str, str]


class StoredTensor(Protocol):
    """A tensor still in its file; slicing reads the rows asked for."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class Shard(Protocol):
    """The part of an open safetensors file that is used here."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> StoredTensor: ...

    def get_tensor(self, name: str) -> Tensor: ...


def load_weights(
    folder: Path,
    plan_weights: Callable[[Collection[str]], WeightPlan],
    device: torch.device,
    *,
    progress: bool,
) -> None:
    """Fill a model from the checkpoint in `folder`.

    `plan_weights` maps the names in the checkpoint to the model's tensors, which are on
    `device`. Every name, shape and dtype is checked before the first weight is read; then one
    tensor at a time goes to the device, so host memory holds less than one shard. `progress`
    draws a bar of bytes on stderr.

    Raises:
        ValueError: a file is missing or broken, or a tensor is missing, unexpected, of another
            shape or of a dtype that is not supported; one line that names it.
    """
    headers = read_headers(folder)
    plan = plan_weights(headers.keys())
    check_plan(folder, plan, headers)
    check_tied(plan, headers)
    by_file: dict[Path, list[str]] = {}
    for name in plan.slots:
        by_file.setdefault(headers[name].file, []).append(name)
    num_bytes = sum(tensor_bytes(headers[name]) for name in plan.slots)
    with tqdm(
        desc=f"loading {folder.name}",
        total=num_bytes,
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        for file, names in by_file.items():
            with open_shard(file, device) as shard:
                for name in names:
                    copy_into(plan.slots[name], shard.get_tensor(name))
                    bar.update(tensor_bytes(headers[name]))


def fill_dummy(parameters: Iterable[Tensor], seed: int) -> None:
    """Fill each tensor with N(0, 0.02), on its device; the same values for the same seed."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in parameters:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            parameter.normal_(std=DUMMY_STD, generator=generators[device])


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Name, place, shape and dtype of every tensor of a checkpoint; reads no weights.

    Raises:
        ValueError: a file is missing or broken, or index and shards contradict each other.
    """
    headers: dict[str, TensorHeader] = {}
    for file, listed in find_files(folder).items():
        found = read_file_headers(file)
        if listed is not None:
            if lacking := listed - found.keys():
                raise ValueError(f"{file}: lacks {show_names(lacking)}, listed in {INDEX_FILE}")
            if unlisted := found.keys() - listed:
                raise ValueError(f"{file}: {INDEX_FILE} does not list {show_names(unlisted)}")
        headers |= found
    return headers


def find_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint and the names the index lists for each (None: no index)."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if (folder / SINGLE_FILE).exists():
        return {folder / SINGLE_FILE: None}
    index_path = folder / INDEX_FILE
    if index_path.exists():
        index = read_json_file(index_path, ShardIndex, max_bytes=MAX_INDEX_BYTES)
        files: dict[Path, set[str] | None] = {}
        listed: dict[str, set[str]] = {}
        for name, file_name in index.weight_map.items():
            listed.setdefault(file_name, set()).add(name)
        for file_name, names in listed.items():
            files[shard_path(index_path, file_name)] = names
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ValueError(
            f"{folder}: holds pickled weights, which can run code and are not read; accepted are "
            f"{SINGLE_FILE} or {INDEX_FILE} with its shards"
        )
    raise ValueError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}")


def shard_path(index_path: Path, file_name: str) -> Path:
    """The shard beside its index.

    The index is untrusted, so a name that would leave the folder is refused. A shard may still
    be a link, as it is in download caches: links were made by the owner of the folder.
    """
    is_plain = "\\" not in file_name and "\0" not in file_name and Path(file_name).name == file_name
    if not is_plain or not file_name.endswith(".safetensors"):
        raise ValueError(
            f"{index_path}: {file_name!r} is not accepted as a shard; it must be the plain name "
            "of a .safetensors file in the same folder"
        )
    return index_path.parent / file_name


def read_file_headers(file: Path) -> dict[str, TensorHeader]:
    """The headers of one safetensors file, in its own order."""
    with open_shard(file, torch.device("cpu")) as shard:
        headers = {}
        for name in shard.keys():  # noqa: SIM118  (not a mapping)
            view = shard.get_slice(name)
            headers[name] = TensorHeader(file, tuple(view.get_shape()), view.get_dtype())
    return headers


@contextmanager
def open_shard(file: Path, device: torch.device) -> Iterator[Shard]:
    """A safetensors file whose tensors are made on `device`; broken ones raise ValueError."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        shard = safe_open(file, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: corrupt or unreadable safetensors file ({error})") from error
    with shard:
        yield shard


def check_plan(folder: Path, plan: WeightPlan, headers: Mapping[str, TensorHeader]) -> None:
    """Raises ValueError unless the checkpoint holds exactly the planned tensors."""
    ignored = plan.skipped_prefixes + plan.kept_prefixes
    wanted = [name for name in headers if name in plan.slots or not name.startswith(ignored)]
    for name in wanted:
        header = headers[name]
        if header.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"{header.file}: tensor {show_name(name)} has dtype {header.dtype}; quantized "
                f"checkpoints are not supported yet, accepted are {', '.join(DTYPE_BYTES)}"
            )
    copies = {copy for copy, _ in plan.tied}
    missing = plan.slots.keys() - headers.keys()
    extra = set(wanted) - plan.slots.keys() - copies
    problems = []
    if missing:
        problems.append(f"lacks {show_names(missing)}")
    if extra:
        files = sorted({headers[name].file.name for name in extra})
        problems.append(f"holds unexpected {show_names(extra)} (in {', '.join(files)})")
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(problems))
    for name, slot in plan.slots.items():
        header = headers[name]
        if header.shape != slot.shape:
            raise ValueError(
                f"{header.file}: tensor {name} has shape {list(header.shape)}, expected "
                f"{list(slot.shape)}"
            )


def check_tied(plan: WeightPlan, headers: Mapping[str, TensorHeader]) -> None:
    """Raises ValueError where a stored copy of a tied tensor differs from its original."""
    for copy, original in plan.tied:
        if copy in headers and not is_same_tensor(copy, original, headers):
            raise ValueError(
                f"{headers[copy].file}: tensor {copy} differs from {original}, although the "
                "config ties them (tie_word_embeddings true)"
            )


def is_same_tensor(first: str, second: str, headers: Mapping[str, TensorHeader]) -> bool:
    """Whether two stored tensors hold the same bits once both are float32."""
    shape = headers[first].shape
    if shape != headers[second].shape:
        return False
    cpu = torch.device("cpu")
    with (
        open_shard(headers[first].file, cpu) as first_shard,
        open_shard(headers[second].file, cpu) as second_shard,
    ):
        views = first_shard.get_slice(first), second_shard.get_slice(second)
        for start in range(0, shape[0], ROWS_PER_COMPARISON):
            # As integers, so that a NaN equals itself.
            a, b = (
                view[start : start + ROWS_PER_COMPARISON].to(torch.float32).view(torch.int32)
                for view in views
            )
            if not torch.equal(a, b):
                return False
    return True


def copy_into(slot: WeightSlot, tensor: Tensor) -> None:
    """Arrange a loaded tensor and write it to its destination, in the destination's dtype."""
    arranged = tensor if slot.arrange is None else slot.arrange(tensor)
    # copy_ would broadcast a smaller tensor without a word.
    assert arranged.shape == slot.destination.shape
    with torch.no_grad():
        slot.destination.copy_(arranged)


def tensor_bytes(header: TensorHeader) -> int:
    """The tensor's size in the file; its dtype must be a supported one."""
    return prod(header.shape) * DTYPE_BYTES[header.dtype]


def show_names(names: Collection[str]) -> str:
    """How many tensors, and the first few names."""
    shown = sorted(names)[:MAX_NAMES_SHOWN]
    rest = len(names) - len(shown)
    more = f" and {rest} more" if rest else ""
    listed = ", ".join(show_name(name) for name in shown)
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {listed}{more}"


def show_name(name: str) -> str:
    """A name from an untrusted file, fit for one line of a terminal."""
    is_plain = name.isprintable() and len(name) <= MAX_NAME_CHARS
    return name if is_plain else repr(name[:MAX_NAME_CHARS])
