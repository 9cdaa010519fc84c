"""E5: which folder compiled code is kept in, and which folders go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from engine.compile_cache import (
    INDUCTOR_VARIABLE,
    MARKER,
    MAX_KEPT_FOLDERS,
    TRITON_VARIABLE,
    check_closed,
    compile_cache_key,
    default_root,
    use_compile_cache,
)
from engine.device_facts import DeviceFacts
from engine.model_config import load_model_config

ROOT = Path(__file__).parents[2]
MODEL = load_model_config(ROOT / "server" / "embedded")
FACTS = DeviceFacts(torch.device("cpu"), "cpu", 2**30, "AVX2")
DTYPES = (torch.float32, torch.bfloat16)
KEY = "0123456789abcdef" * 2
OLD_S = 10_000.0


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of source files."""
    folder = tmp_path / "code"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("x = 1\n")
    (folder / "sub" / "b.py").write_text("y = 2\n")
    return folder


def test_the_key_follows_what_is_compiled(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: each cause makes a key of its own, the same causes the same. Oracle: distinctness."""

    def key(**changes: object) -> str:
        arguments = {"model": MODEL, "facts": FACTS, "dtypes": DTYPES, "code_folders": [code]}
        return compile_cache_key(**(arguments | changes))  # type: ignore[arg-type]

    first = key()
    assert len(first) == 32 and key() == first
    assert key(model=replace(MODEL, eos_token_ids=(7,), max_position_embeddings=9)) == first
    assert key(facts=replace(FACTS, free_bytes=1)) == first
    keys = [
        first,
        key(model=replace(MODEL, hidden_size=264)),
        key(model=replace(MODEL, rms_norm_eps=1e-5)),
        key(facts=replace(FACTS, name="H200")),
        key(facts=replace(FACTS, capability="AVX512")),
        key(facts=replace(FACTS, device=torch.device("cuda"))),
        key(dtypes=DTYPES[::-1]),
    ]
    (code / "a.py").write_text("x = 2\n")
    keys.append(key())
    (code / "sub" / "b.py").rename(code / "sub" / "c.py")
    keys.append(key())
    (code / "notes.txt").write_text("no code")
    assert key() == keys[-1]
    for module, version in ((torch, "2.99"), (triton, "3.99")):
        monkeypatch.setattr(module, "__version__", version)
        keys.append(key())
    monkeypatch.setattr(sys, "version", "3.99")
    keys.append(key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_our_own_code_is_in_the_key() -> None:
    """E5: by default engine/ and graphs/ of this tree. Oracle: the key of these folders."""
    folders = [ROOT / "engine", ROOT / "graphs"]
    assert compile_cache_key(MODEL, FACTS, DTYPES) == compile_cache_key(
        MODEL, FACTS, DTYPES, folders
    )


def test_the_environment_points_at_a_private_folder(tmp_path: Path) -> None:
    """E5: both variables, and mode 0700. Oracle: the folders."""
    root, environment = tmp_path / "cache" / "compile", {}
    folder = use_compile_cache(KEY, root, environment)
    assert folder == root / KEY
    assert environment == {
        INDUCTOR_VARIABLE: str(folder / "inductor"),
        TRITON_VARIABLE: str(folder / "triton"),
    }
    for private in (root, folder):
        assert private.stat().st_mode & 0o777 == 0o700
    second = use_compile_cache(KEY[::-1], root, environment)
    assert environment[INDUCTOR_VARIABLE] == str(second / "inductor")


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """E5: another folder in either variable is the user's. Oracle: the variables."""
    environment = {TRITON_VARIABLE: "/mine"}
    folder = use_compile_cache(KEY, tmp_path, environment)
    assert environment == {INDUCTOR_VARIABLE: str(folder / "inductor"), TRITON_VARIABLE: "/mine"}
    environment = {INDUCTOR_VARIABLE: "/mine"}
    use_compile_cache(KEY, tmp_path, environment)
    assert environment == {INDUCTOR_VARIABLE: "/mine", TRITON_VARIABLE: str(folder / "triton")}


def test_the_root_is_where_caches_belong() -> None:
    """E5: XDG_CACHE_HOME, where it is absolute as its specification demands, else ~/.cache."""
    at_home = Path.home() / ".cache" / "deltaloom" / "compile"
    assert default_root({"XDG_CACHE_HOME": "/big"}) == Path("/big/deltaloom/compile")
    assert default_root({"XDG_CACHE_HOME": "relative"}) == default_root({}) == at_home


def make_folder(root: Path, name: str, age_s: float, *, is_marked: bool = True) -> Path:
    """A folder with a file in it, as a start would leave it that long ago."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "code.so").write_text("")
    if is_marked:
        (folder / MARKER).touch()
        then_s = time.time() - age_s
        os.utime(folder / MARKER, (then_s, then_s))
    return folder


def test_old_folders_go(tmp_path: Path) -> None:
    """E5: the newest stay, with the one in use; nothing that is not ours goes.

    Oracle: what is left in the folder.
    """
    root = tmp_path / "compile"
    names = [f"{index:032x}" for index in range(7)]
    for index, name in enumerate(names):
        make_folder(root, name, OLD_S * (index + 1))
    kept = {KEY, *names[: MAX_KEPT_FOLDERS - 1]}
    outside = make_folder(tmp_path, "f" * 32, 0)  # a link to it is none of the newest
    (root / ("e" * 32)).symlink_to(outside)
    kept.add("e" * 32)
    for name in ("notes", "d" * 31, "d" * 33):
        kept.add(make_folder(root, name, 9 * OLD_S).name)
    kept.add(make_folder(root, "c" * 32, 0, is_marked=False).name)
    (root / ("b" * 32)).write_text("a file")
    kept.add("b" * 32)
    gone = root / names[-1]
    (gone / "link").symlink_to(outside)
    use_compile_cache(KEY, root, {})
    assert {path.name for path in root.iterdir()} == kept
    assert (outside / "code.so").exists()


def test_folders_of_other_starts_stay(tmp_path: Path) -> None:
    """E5: a start that compiles right now keeps its folder. Oracle: what is left."""
    names = [f"{index:032x}" for index in range(7)]
    for name in names:
        make_folder(tmp_path, name, 1.0)
    use_compile_cache(KEY, tmp_path, {})
    assert {path.name for path in tmp_path.iterdir()} == {KEY, *names}


def make_unusable(root: Path, how: str) -> Path:
    """A place that cannot hold a cache: `root`, or one where nobody can create anything."""
    root.parent.mkdir(parents=True)
    if how == "a file":
        root.write_text("")
    elif how == "open to all":
        root.mkdir()
        root.chmod(0o777)
    elif how == "a planted link":
        root.mkdir()
        (root / KEY).symlink_to(root.parent)
    else:
        return Path("/proc/no/cache")
    return root


@pytest.mark.parametrize("how", ["a file", "open to all", "a planted link", "not writable"])
def test_an_unusable_root_is_replaced(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """E5: a temporary folder and a warning, never a failed start. Oracle: the folder."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    root = make_unusable(tmp_path / "home" / "compile", how)
    environment: dict[str, str] = {}
    folder = use_compile_cache(KEY, root, environment)
    fallback = temporary / f"deltaloom-{os.getuid()}"
    assert folder == fallback / KEY
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment[INDUCTOR_VARIABLE] == str(folder / "inductor")
    assert str(root) in caplog.text
    fallback.rename(temporary / "moved")
    fallback.write_text("not a folder either")
    last = use_compile_cache(KEY, root, {})
    assert last.parent == temporary and last.is_dir()


def test_a_user_without_a_home_gets_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: containers run under user ids that no passwd file knows. Oracle: the folder."""

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = use_compile_cache(KEY, None, {})
    assert folder == tmp_path / f"deltaloom-{os.getuid()}" / KEY


def test_a_root_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: its owner could swap our folder, sticky bit or not. Oracle: the refusal."""
    owner = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: owner + 1)
    root = tmp_path / "root"
    root.mkdir(mode=0o1777)
    if owner == 0:
        os.chown(root, 54321, -1)
    with pytest.raises(PermissionError, match="another user"):
        check_closed(root)


COMPILE = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from engine.compile_cache import enable_disk_caches, use_compile_cache
use_compile_cache("0" * 32, Path(sys.argv[1]))
enable_disk_caches()
with torch.inference_mode():
    torch.compile(lambda x: (x * 2).relu() + 1)(torch.ones(64))
print(json.dumps({name: dict(counters[name]) for name in ("inductor", "aot_autograd")}))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """E5: a fresh process loads what an earlier one compiled. Oracle: torch's own counters."""
    hidden = (INDUCTOR_VARIABLE, TRITON_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    hits = []
    for _ in range(2):
        output = subprocess.run(
            [sys.executable, "-c", COMPILE, str(tmp_path)],
            env=environment | {"PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        counters = json.loads(output.splitlines()[-1])
        hits.append(counters["aot_autograd"].get("autograd_cache_hit", 0))
    assert hits == [0, 1]
    assert (tmp_path / ("0" * 32) / "inductor" / "aotautograd").is_dir()
