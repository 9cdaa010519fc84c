"""A tokenizer.json: encoding is the tokenizers library's, text comes from token bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Library
from tokenizers.pre_tokenizers import ByteLevel

from engine.detokenize import ByteTextStream, WindowTextStream

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """How a tokenizer.json turns token strings into bytes.

    `is_local` False: in a way that only the library knows, so text needs a window.
    """

    is_byte_level: bool = False
    is_local: bool = True
    has_byte_pieces: bool = False
    drops_first_space: bool = False
    replaced: tuple[tuple[str, str], ...] = ()


class HfTokenizer:
    """See `engine.tokens.Tokenizer`."""

    def __init__(self, spec: str, decoder: Decoder) -> None:
        self._library = _library_from(spec)
        self._decoder = decoder
        added = self._library.get_added_tokens_decoder()
        self._added_bytes = {i: token.content.encode() for i, token in added.items()}
        self._control_tokens = {
            token.content: i
            for i, token in added.items()
            if token.special or _is_markup(token.content)
        }
        self._control_ids = frozenset(self._control_tokens.values())
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        self._byte_of_char = _byte_of_char() if decoder.is_byte_level else {}
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def control_tokens(self) -> Mapping[str, int]:
        return self._control_tokens

    def encode(self, text: str, *, parse_special: bool, add_special_tokens: bool) -> list[int]:
        if parse_special:
            return _encode(self._library, text, add_special_tokens)
        ids = _encode(self._plain_library, text, add_special_tokens=False)
        # A few vocabularies hold their control tokens as learned ones too.
        if not self._control_ids.isdisjoint(ids):
            raise ValueError("text: this tokenizer cannot spell a control token as plain text")
        return _encode(self._plain_library, text, True) if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        data = self._bytes.get(token_id)
        if data is None:
            data = self._build_bytes(token_id)
            if data:  # ids that name no token must not fill the table
                self._bytes[token_id] = data
        return data

    def start_bytes(self, token_id: int) -> tuple[bytes, bool]:
        data = self.token_bytes(token_id)
        if self._decoder.drops_first_space:
            return data.removeprefix(b" "), not data
        return data, False

    def token_string(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> ByteTextStream | WindowTextStream:
        skipped_ids = self._special_ids if skip_special_tokens else frozenset()
        if self._decoder.is_local:
            is_at_start = self._decoder.drops_first_space and not prompt_token_ids
            return ByteTextStream(self, skipped_ids=skipped_ids, is_at_start=is_at_start)
        return WindowTextStream(
            self._decode_window, skipped_ids=skipped_ids, prompt_token_ids=prompt_token_ids
        )

    def _decode_window(self, token_ids: Sequence[int]) -> str:
        known = [i for i in token_ids if 0 <= i < self._vocab_size]
        return self._library.decode(known, skip_special_tokens=False)

    @cached_property
    def _plain_library(self) -> Library:
        """The same vocabulary without control tokens: their letters are ordinary text."""
        spec = json.loads(self._library.to_str())
        words = [token for token in spec["added_tokens"] if token["id"] not in self._control_ids]
        return _library_from(json.dumps(spec | {"added_tokens": words}))

    def _build_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._library.id_to_token(token_id) if 0 <= token_id < self._vocab_size else None
        if token is None:
            return b""
        if self._decoder.is_byte_level:
            try:
                return bytes(self._byte_of_char[char] for char in token)
            except KeyError:
                return token.encode()
        byte_piece = _BYTE_PIECE.fullmatch(token) if self._decoder.has_byte_pieces else None
        if byte_piece:
            return bytes((int(byte_piece[1], 16),))
        for old, new in self._decoder.replaced:
            token = token.replace(old, new)
        return token.encode()


def load_hf_tokenizer(file: Path) -> HfTokenizer:
    """Read a tokenizer.json.

    Raises:
        ValueError: it cannot be read; the message names the file.
    """
    try:
        spec = file.read_text(encoding="utf-8")
        return HfTokenizer(spec, _decoder_from(json.loads(spec).get("decoder")))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise ValueError(f"{file}: not a readable tokenizer.json ({error})") from error


def _is_markup(token: str) -> bool:
    """Vocabularies also grow by words and runs of spaces; those are ordinary text."""
    return not all(char.isalnum() or char.isspace() for char in token)


def _library_from(spec: str) -> Library:
    library = Library.from_str(spec)
    library.no_truncation()
    library.no_padding()
    return library


def _encode(library: Library, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return library.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError as error:
        raise ValueError("text must be valid Unicode (it holds a lone surrogate)") from error


def _decoder_from(spec: dict[str, Any] | None) -> Decoder:
    """What is known of a decoder; anything that is not known to be local is not."""
    steps = _flatten(spec)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoder(is_byte_level=True)
    replaced: list[tuple[str, str]] = []
    has_byte_pieces = drops_first_space = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                has_byte_pieces = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drops_first_space = True
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
                drops_first_space = step.get("prepend_scheme") != "never"
            case _:
                return Decoder(is_local=False)
    if not replaced:
        return Decoder(is_local=False)
    return Decoder(
        has_byte_pieces=has_byte_pieces,
        drops_first_space=drops_first_space,
        replaced=tuple(replaced),
    )


def _flatten(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec["decoders"] for step in _flatten(part)]
    return [spec]


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the rest follow U+0100."""
    alphabet = set(ByteLevel.alphabet())
    shifted = [byte for byte in range(256) if chr(byte) not in alphabet]
    table = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    table.update({chr(256 + rank): byte for rank, byte in enumerate(shifted)})
    assert table.keys() == alphabet
    return table
