"""Keeps a client's text from becoming control tokens when a chat prompt is encoded.

A chat template writes control tokens and the client's text into one string. Where the client's
text could spell a control token, or a part of one at its edge, its letters are disguised
before rendering: each becomes a private-use character. The rendered string then shows which
letters are the client's, however the template cut or moved them, and a control token counts
only if the template wrote all of it. Template logic does not see disguised letters either, so
it takes a client's markup for text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from engine.chat.messages import MessageError
from engine.tokens import Tokenizer

MAX_NESTING = 128

_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_FIRST_PRIVATE = 0xF0000
_LAST_PRIVATE = 0x10FFFD


class Disguise:
    """A one-to-one map of the letters of control tokens to unused private-use characters."""

    def __init__(self, control: ControlText, first_code: int) -> None:
        self._control = control
        self._hide = {ord(char): first_code + i for i, char in enumerate(control.alphabet)}
        self._show = {code: letter for letter, code in self._hide.items()}

    def hide(self, text: str) -> str:
        """`text`, disguised if it could take part in a control token."""
        return text.translate(self._hide) if self._control.is_suspicious(text) else text

    def show(self, rendered: str) -> str:
        return rendered.translate(self._show)

    def is_hidden(self, char: str) -> bool:
        return ord(char) in self._show


class ControlText:
    """The control tokens of one tokenizer as they can appear in text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.control_tokens
        tokens = sorted((token for token in self._ids if token), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")
        self.alphabet = sorted({char for token in tokens for char in token})
        self._edge_len = max(map(len, tokens), default=1) - 1
        self._first_chars = frozenset(token[0] for token in tokens)
        self._last_chars = frozenset(token[-1] for token in tokens)
        self._beginnings = tuple({t[:n] for t in tokens for n in range(1, len(t))})
        self._endings = tuple({t[n:] for t in tokens for n in range(1, len(t))})

    def is_suspicious(self, text: str) -> bool:
        """Whether `text` holds a control token, or could make one with the text beside it.

        Templates trim what they insert, so edges are looked at without spaces.
        """
        if self._pattern.search(text):
            return True
        core = text.strip()
        head, tail = core[: self._edge_len], core[-self._edge_len :]
        return (not self._first_chars.isdisjoint(tail) and core.endswith(self._beginnings)) or (
            not self._last_chars.isdisjoint(head) and core.startswith(self._endings)
        )

    def encode(self, rendered: str, disguise: Disguise | None) -> list[int]:
        """The ids of a rendered prompt; only what the template wrote is a control token.

        Raises:
            MessageError: client text would still become a control token, or has no ids.
        """
        text = disguise.show(rendered) if disguise else rendered
        own, is_forged = [], False
        for match in self._pattern.finditer(text):
            if disguise and any(map(disguise.is_hidden, rendered[match.start() : match.end()])):
                is_forged = True
            else:
                own.append(match)
        try:
            ids = self._encode_around(text, own) if is_forged else self._encode_flat(text)
        except ValueError as error:
            raise MessageError(f"messages cannot be encoded: {error}", "messages") from error
        # Normalization may turn other letters into those of a control token.
        found = Counter(i for i in ids if i in self._control_ids)
        if found - Counter(self._ids[match[0]] for match in own):
            raise MessageError("messages spell a control token in disguise", "messages")
        return ids

    @property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def _encode_flat(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True, add_special_tokens=False)

    def _encode_around(self, text: str, own: Iterable[re.Match[str]]) -> list[int]:
        """All but the `own` control tokens as plain text."""
        ids: list[int] = []
        end = 0
        for match in own:
            ids += self._encode_plain(text[end : match.start()])
            ids.append(self._ids[match[0]])
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=False, add_special_tokens=False)


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:  # noqa: ANN401
    """Every string of a JSON value, keys included.

    Raises:
        MessageError: the value is nested too deeply to be a chat.
    """
    if depth > MAX_NESTING:
        raise MessageError(f"messages may be nested {MAX_NESTING} levels deep", "messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item, depth + 1)


def hide_in(value: Any, disguise: Disguise) -> Any:  # noqa: ANN401
    """A copy of a JSON value with its strings disguised, keys included."""
    if isinstance(value, str):
        return disguise.hide(value)
    if isinstance(value, dict):
        return {disguise.hide(key): hide_in(item, disguise) for key, item in value.items()}
    if isinstance(value, list):
        return [hide_in(item, disguise) for item in value]
    return value


def unused_codes(texts: Iterable[str], num_codes: int) -> int:
    """The first of `num_codes` successive private-use characters that no text holds.

    Raises:
        MessageError: the texts leave no such run.
    """
    taken = sorted({ord(char) for text in texts for char in _PRIVATE.findall(text)})
    first = _FIRST_PRIVATE
    for code in taken:
        if code < first + num_codes:
            first = code + 1
    if first + num_codes > _LAST_PRIVATE + 1:
        raise MessageError("messages use too many private-use characters", "messages")
    return first
