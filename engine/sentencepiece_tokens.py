"""A SentencePiece tokenizer.model: pieces are the library's, control tokens are split off here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from engine.detokenize import ByteTextStream

_SPACE = "▁"
# A private-use character: no piece holds it, so it never joins with the text after it.
_ANCHOR = "\ue000"


class SentencePieceTokenizer:
    """See `engine.tokens.Tokenizer`. `config` is the folder's tokenizer_config.json.

    Control tokens are the model's control and user-defined symbols and the added tokens of
    `config`. Only a text's start gets the dummy space that SentencePiece puts before words.
    """

    def __init__(self, model: bytes, config: Mapping[str, Any]) -> None:
        self._library = SentencePieceProcessor(model_proto=model)
        self._num_pieces: int = self._library.vocab_size()
        self._added = _added_tokens(config)
        self._vocab_size = max([self._num_pieces, *(i + 1 for i in self._added)])
        pieces = range(self._num_pieces)
        control_ids = frozenset(i for i in pieces if self._library.is_control(i))
        symbols = {self._library.id_to_piece(i): i for i in pieces if self._is_symbol(i)}
        added = {content: i for i, (content, _) in self._added.items()}
        self._special_ids = control_ids | {i for i, (_, special) in self._added.items() if special}
        self._control_tokens: dict[str, int] = symbols | added
        self._control_ids = frozenset(self._control_tokens.values())
        self._control_pattern = _pattern_of(self._control_tokens)
        self._has_bos = bool(config.get("add_bos_token", True)) and self._library.bos_id() >= 0
        self._has_eos = bool(config.get("add_eos_token", False)) and self._library.eos_id() >= 0
        self._anchor_ids: list[int] = self._library.encode(_ANCHOR)
        self._keeps_start = self._is_space_dropped_repeatedly()
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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("text must be valid Unicode (it holds a lone surrogate)") from error
        ids = self._encode_special(text) if parse_special else self._encode_plain(text)
        if add_special_tokens:
            bos = [self._library.bos_id()] if self._has_bos else []
            eos = [self._library.eos_id()] if self._has_eos else []
            return bos + ids + eos
        return ids

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
        if token_id in self._special_ids or not data:
            return data, True
        if token_id in self._added or self._library.is_byte(token_id):
            return data, False
        shown = str(self._library.decode([token_id])).encode()
        return shown, self._keeps_start and not shown

    def token_string(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        if token in self._control_tokens:
            return self._control_tokens[token]
        piece_id = int(self._library.piece_to_id(token))
        # The library answers every unknown string with the id of the unknown piece.
        return piece_id if self._library.id_to_piece(piece_id) == token else None

    def stream(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> ByteTextStream:
        return ByteTextStream(
            self,
            skipped_ids=self._special_ids if skip_special_tokens else frozenset(),
            is_at_start=not prompt_token_ids,
        )

    def _is_symbol(self, piece_id: int) -> bool:
        """Control and user-defined pieces: the trainer scores learned ones -0.0 or less."""
        library = self._library
        if library.is_control(piece_id):
            return True
        is_other = (
            library.is_byte(piece_id) or library.is_unknown(piece_id) or library.is_unused(piece_id)
        )
        score = library.get_score(piece_id)
        return not is_other and score == 0.0 and math.copysign(1.0, score) > 0.0

    def _is_space_dropped_repeatedly(self) -> bool:
        """Whether a text that begins with two spaces loses both when decoded."""
        space_id = self._library.piece_to_id(_SPACE)
        if self._library.id_to_piece(space_id) != _SPACE:
            return False
        return str(self._library.decode([space_id, space_id])) == ""

    def _encode_special(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            ids.extend(self._encode_part(text[end : match.start()], is_at_start=end == 0))
            ids.append(self._control_tokens[match[0]])
            end = match.end()
        return ids + self._encode_part(text[end:], is_at_start=end == 0)

    def _encode_plain(self, text: str) -> list[int]:
        """Cuts every control token after its first letter: no part holds a whole one."""
        ids: list[int] = []
        end = 0
        while match := self._control_pattern.search(text, end):
            cut = match.start() + 1
            ids.extend(self._encode_part(text[end:cut], is_at_start=end == 0))
            end = cut
        ids.extend(self._encode_part(text[end:], is_at_start=end == 0))
        # One-letter symbols, and letters that only normalization turns into a symbol.
        if not self._control_ids.isdisjoint(ids):
            raise ValueError("text: this tokenizer cannot spell a control token as plain text")
        return ids

    def _encode_part(self, text: str, *, is_at_start: bool) -> list[int]:
        """Encode ordinary text; only at a text's start it gets the dummy space."""
        if not text:
            return []
        if not is_at_start:
            ids: list[int] = self._library.encode(_ANCHOR + text)
            num_anchor = len(self._anchor_ids)
            if ids[:num_anchor] == self._anchor_ids:
                return ids[num_anchor:]
        plain: list[int] = self._library.encode(text)
        return plain

    def _build_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id][0].encode()
        if not 0 <= token_id < self._num_pieces:
            return b""
        piece: str = self._library.id_to_piece(token_id)
        if self._library.is_byte(token_id):
            return bytes((int(piece[3:5], 16),))
        if self._library.is_unknown(token_id):
            return str(self._library.decode([token_id])).encode()
        return piece.replace(_SPACE, " ").encode()


def load_sentencepiece_tokenizer(file: Path) -> SentencePieceTokenizer:
    """Read a tokenizer.model, and the tokenizer_config.json beside it where there is one.

    Raises:
        ValueError: one of them cannot be read; the message names the file.
    """
    config_file = file.with_name("tokenizer_config.json")
    config = _read_config(config_file) if config_file.is_file() else {}
    try:
        return SentencePieceTokenizer(file.read_bytes(), config)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{file}: not a readable SentencePiece model ({error})") from error


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        _added_tokens(config)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{file}: not a readable tokenizer_config.json ({error})") from error
    return dict(config)


def _added_tokens(config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (content, is special) of `added_tokens_decoder`."""
    added = config.get("added_tokens_decoder") or {}
    return {int(i): (str(t["content"]), bool(t.get("special"))) for i, t in added.items()}


def _pattern_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
