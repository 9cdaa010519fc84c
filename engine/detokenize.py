"""Turns output tokens into text as they come, without looking at earlier text again."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class TokenTable(Protocol):
    """What a vocabulary says about single tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def start_bytes(self, token_id: int) -> tuple[bytes, bool]:
        """The bytes a token adds while no text precedes it, and whether that stays so."""
        ...


class ByteTextStream:
    """Text of tokens that are byte strings: bytes are joined and decoded as UTF-8.

    An incomplete character is held; bytes that can be no character become U+FFFD.
    `is_at_start` asks for the rules of a text's first token (no leading space).
    """

    def __init__(
        self, table: TokenTable, *, skipped_ids: frozenset[int], is_at_start: bool
    ) -> None:
        self._table = table
        self._skipped_ids = skipped_ids
        self._is_at_start = is_at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._bytes_of(i) for i in token_ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped_ids:
            return b""
        if self._is_at_start:
            data, self._is_at_start = self._table.start_bytes(token_id)
            return data
        return self._table.token_bytes(token_id)


class WindowTextStream:
    """Text of tokens whose decoder only a library knows: the last few are decoded again.

    `decode` must be local: a token's text may depend on its direct neighbours only. Text that
    ends in U+FFFD is held, since the next token may complete the character.
    """

    _WINDOW_LEN = 4

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped_ids: frozenset[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window = list(prompt_token_ids[-self._WINDOW_LEN :])
        self._sent = decode(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(i for i in token_ids if i not in self._skipped_ids)
        text = self._decode(self._window)
        if text.endswith("\ufffd") or len(text) <= len(self._sent):
            return ""
        delta = text[len(self._sent) :]
        self._window = self._window[-self._WINDOW_LEN :]
        self._sent = self._decode(self._window)
        return delta

    def flush(self) -> str:
        delta = self._decode(self._window)[len(self._sent) :]
        self._window, self._sent = [], ""
        return delta
