"""E5: parts of files that a killed start has left are dropped by the next. Oracle: the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kept_code import RECORD, KeptCode

PARTS = ("inductor", "triton")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in PARTS:
        (tmp_path / part / "ab").mkdir(parents=True)
        (tmp_path / part / "ab" / "good.so").write_bytes(b"x" * 100)
    (tmp_path / "marker").touch()
    return tmp_path


def names(folder: Path) -> list[str]:
    """The files in both parts."""
    paths = [path for part in PARTS for path in (folder / part).rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in paths)


def start_and_die(folder: Path) -> None:
    """A start that ends before it has recorded anything."""
    KeptCode(folder, PARTS).close()


def record_all(folder: Path) -> None:
    """Record the files as they are: a start beside it keeps them from being dropped first."""
    other = KeptCode(folder, ())
    kept = KeptCode(folder, PARTS)
    other.close()
    kept.record()
    kept.close()


def test_what_an_interrupted_first_start_left_is_dropped(folder: Path) -> None:
    """E5: nothing was ever recorded, so nothing is known to be whole."""
    start_and_die(folder)
    assert names(folder) == []
    assert (folder / "marker").is_file()


def test_recorded_files_stay_and_all_others_go(folder: Path) -> None:
    """E5: a later start was killed while it wrote, and a file has lost its end."""
    record_all(folder)
    start_and_die(folder)
    assert names(folder) == ["inductor/ab/good.so", "triton/ab/good.so"]
    (folder / "inductor" / "ab" / "half.so").touch()
    (folder / "triton" / "ab" / "good.so").write_bytes(b"x" * 99)
    start_and_die(folder)
    assert names(folder) == ["inductor/ab/good.so"]


def test_nothing_goes_or_is_recorded_beside_another_start(folder: Path) -> None:
    """E5: the other's files may be half written, and are its own."""
    before = names(folder)
    other = KeptCode(folder, ())
    beside = KeptCode(folder, PARTS)
    assert names(folder) == before
    beside.record()
    assert not (folder / RECORD).exists()
    for kept in (other, beside):
        kept.close()


def test_a_record_that_is_not_whole_counts_for_nothing(folder: Path) -> None:
    """E5: as if there were none."""
    record_all(folder)
    text = (folder / RECORD).read_text()
    (folder / RECORD).write_text(text[:-5])
    start_and_die(folder)
    assert names(folder) == []


def test_links_are_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """E5: what a link points to stays, the link goes."""
    outside = tmp_path_factory.mktemp("outside") / "file"
    outside.touch()
    (folder / "inductor" / "link").symlink_to(outside)
    (folder / "inductor" / "folder").symlink_to(outside.parent)
    start_and_die(folder)
    assert outside.is_file()
    assert sorted(path.name for path in (folder / "inductor").iterdir()) == ["ab"]


def test_a_disk_that_takes_no_record_does_not_undo_a_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E5: a folder stands where the record should; a warning, and the next start begins anew."""
    (folder / RECORD).mkdir()
    record_all(folder)
    assert "compiles again" in caplog.text
    start_and_die(folder)
    assert names(folder) == []
