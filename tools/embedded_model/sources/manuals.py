"""The manuals of Python, Django, SQLAlchemy and SQLite."""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from tools.embedded_model.sources.documents import Document, find_files, read_text, split_text
from tools.embedded_model.sources.markup import markdown_of_html, markdown_of_rst

_PIECE = 6000
_SQLITE_SKIPPED = re.compile(
    r"changes|releaselog|keyword_index|doclist|syntax/|hctree|news|cves|chronology|requirements|"
    r"matrix|sitemap|toc|funclist|constlist|objlist|search|doc_"
)


def python_manual(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """python3.11-doc (PSF-2.0)."""
    root = folder / "x/python3.11-doc/usr/share/doc/python3.11/html/_sources"
    skipped = r"whatsnew|changelog|c-api|license|distutils|about|copyright"
    yield from _rst_documents(root, "*.rst.txt", skipped)


def django_manual(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """Django 5.2 (BSD-3-Clause)."""
    skipped = r"^releases/|/releases/|^internals/|/internals/|^ref/contrib/gis|^man/|/man/"
    yield from _rst_documents(folder / "x/Django-5.2/docs", "*.txt", skipped)


def sqlalchemy_manual(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """SQLAlchemy 2.0.40 (MIT)."""
    root = folder / "x/sqlalchemy-2.0.40/doc/build"
    yield from _rst_documents(root, "*.rst", r"changelog|^copyright|/copyright")


def sqlite_manual(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """sqlite3-doc (public domain)."""
    root = folder / "x/sqlite3-doc/usr/share/doc/sqlite3"
    for path in sorted(root.glob("*.html")):
        if _SQLITE_SKIPPED.search(path.name):
            continue
        for piece in split_text(markdown_of_html(read_text(path)), _PIECE):
            if len(piece) > 400:
                yield piece


def _rst_documents(root: Path, pattern: str, skipped: str) -> Iterator[str]:
    """Pieces of the files below root whose path, seen from root, has nothing of `skipped`."""
    for path in find_files(root, pattern):
        if re.search(skipped, path.relative_to(root).as_posix()):
            continue
        for piece in split_text(markdown_of_rst(read_text(path)), _PIECE):
            if len(piece) > 300:
                yield piece
