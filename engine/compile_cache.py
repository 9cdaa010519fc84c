"""The folder that keeps compiled code between starts, private to the user.

One folder per key. What is compiled depends on all that the key is made of: Inductor and
AOTAutograd key their own entries too, but not on everything (see ADR 14).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch._functorch.config
import torch._inductor.config
import triton
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import engine
import graphs
from engine.device_facts import DeviceFacts
from engine.model_config import ModelConfig

logger = logging.getLogger(__name__)

INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
INDUCTOR_PART, TRITON_PART = "inductor", "triton"
MARKER = "deltaloom-compile-cache"
MAX_KEPT_FOLDERS = 4
# A younger folder may be in use by a start that still compiles.
MIN_PRUNED_AGE_S = 600.0
# Fields of a model that no compiled code depends on.
IRRELEVANT_FIELDS = frozenset(("eos_token_ids", "max_position_embeddings", "mtp_num_layers"))
CODE_FOLDERS = (Path(*engine.__path__), Path(*graphs.__path__))
_KEY = re.compile(r"[0-9a-f]{32}")


def compile_cache_key(
    model: ModelConfig,
    facts: DeviceFacts,
    dtypes: Sequence[torch.dtype],
    code_folders: Iterable[Path] = CODE_FOLDERS,
) -> str:
    """32 hex digits of versions, device, threads, model, dtypes and our own code."""
    fields = {name: value for name, value in asdict(model).items() if name not in IRRELEVANT_FIELDS}
    parts = {
        "torch": torch.__version__,
        "git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": sys.version,
        "threads": torch.get_num_threads(),  # generated loops name it
        "device": [facts.device.type, facts.name, facts.capability],
        "model": fields,
        "dtypes": [str(dtype) for dtype in dtypes],
        "code": [hash_code(folder) for folder in code_folders],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_code(folder: Path) -> str:
    """A digest of all Python files below `folder`, their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def use_compile_cache(
    key: str,
    root: Path | None = None,
    environment: MutableMapping[str, str] = os.environ,
) -> Path:
    """Point Inductor and Triton at the folder of `key` below `root`, and prune old ones.

    Call it before anything is compiled. Variables that the user has set keep their values. A
    root that cannot be used is replaced by a temporary folder, with a warning. Returns the folder.
    """
    root = default_root(environment) if root is None else root
    folder = prepare_folder(root, key)
    if folder.parent == root:
        prune(root, key)
    default = Path(default_cache_dir())
    set_unless_given(environment, INDUCTOR_VARIABLE, folder / INDUCTOR_PART, default)
    set_unless_given(environment, TRITON_VARIABLE, folder / TRITON_PART, default)
    return folder


def enable_disk_caches() -> None:
    """Let the calling thread keep what it compiles: torch's settings are per thread.

    TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE still have the last word.
    """
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True


def default_root(environment: MutableMapping[str, str]) -> Path:
    """deltaloom/compile in XDG_CACHE_HOME (where it is absolute), or in ~/.cache.

    A temporary folder for a user who has no home, as in containers with a user id of their own.
    """
    wanted = Path(environment.get("XDG_CACHE_HOME", ""))
    try:
        home = wanted if wanted.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return temporary_root()
    return home / "deltaloom" / "compile"


def temporary_root() -> Path:
    """Where compiled code goes when there is no better place."""
    return Path(tempfile.gettempdir()) / f"deltaloom-{os.getuid()}"


def prepare_folder(root: Path, key: str) -> Path:
    """The folder of `key`, marked as ours and as used now."""
    for candidate in (root, temporary_root()):
        folder = candidate / key
        try:
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_closed(candidate)
            make_private(folder)
            (folder / MARKER).touch()
        except (OSError, RuntimeError) as fault:
            logger.warning("compiled code is not kept in %s: %s", candidate, fault)
        else:
            return folder
    return Path(tempfile.mkdtemp(prefix="deltaloom-compile-"))


def check_closed(root: Path) -> None:
    """Refuse a root in which another user could put folders in place of ours.

    Raises:
        OSError: others may write there, and the sticky bit does not hold them back, or own it.
    """
    status = root.stat()
    mode = status.st_mode
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{root} belongs to another user")
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise PermissionError(f"other users can write to {root}")


def make_private(folder: Path) -> None:
    """Create `folder`, closed to others; code is loaded from it.

    Raises:
        OSError: it cannot be made, is a link, or belongs to someone else.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is a link, or belongs to another user")
    folder.chmod(0o700)


def prune(root: Path, key: str) -> None:
    """Delete our folders below `root` but the newest ones and that of `key`.

    Links and everything without our name and marker are left alone.
    """
    ages = sorted((age_of(folder), folder) for folder in root.iterdir() if is_ours(folder))
    others = [(age_s, folder) for age_s, folder in ages if folder.name != key]
    for age_s, folder in others[MAX_KEPT_FOLDERS - 1 :]:
        if age_s >= MIN_PRUNED_AGE_S:
            shutil.rmtree(folder, ignore_errors=True)  # follows no links


def is_ours(folder: Path) -> bool:
    """Whether `folder` is one that `prepare_folder` made."""
    is_folder = folder.is_dir() and not folder.is_symlink()
    return is_folder and bool(_KEY.fullmatch(folder.name)) and (folder / MARKER).is_file()


def age_of(folder: Path) -> float:
    """Seconds since a start last used the folder."""
    try:
        return time.time() - (folder / MARKER).stat().st_mtime
    except FileNotFoundError:  # another process prunes as well
        return 0.0


def set_unless_given(
    environment: MutableMapping[str, str], name: str, folder: Path, default: Path
) -> None:
    """Set the variable, unless it holds another value than one of ours or torch's own default.

    torch writes its default into the environment when it compiles before us.
    """
    given = Path(environment.get(name, ""))
    is_given = given.is_absolute() and not given.is_relative_to(default)
    if is_given and not any(is_ours(parent) for parent in given.parents):
        logger.info("%s is %s: compiled code is kept there", name, given)
        return
    environment[name] = str(folder)
