"""Text to token ids and back: tokenizer.json, else a SentencePiece tokenizer.model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.hf_tokens import load_hf_tokenizer
from engine.sentencepiece_tokens import load_sentencepiece_tokenizer


class TextStream(Protocol):
    """Incremental detokenization of one output."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` make final; bytes of an unfinished character are held."""
        ...

    def flush(self) -> str:
        """The text still held at the end (an unfinished character becomes U+FFFD)."""
        ...


class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer.

    Invariant: for any ids and any chunks of them, the pushes to `stream(())` and its flush
    join to `decode(ids)`. After a prompt the text goes on where the prompt ended: a leading
    space that `decode` drops at a text's start is kept. Ids that name no token have no text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that skip_special_tokens drops from text."""
        ...

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Tokens, special or not, that stand outside ordinary text, and their ids."""
        ...

    def encode(self, text: str, *, parse_special: bool, add_special_tokens: bool) -> list[int]:
        """`parse_special` False encodes the letters of a control token as ordinary text.

        Raises:
            ValueError: the text is no valid Unicode, or this vocabulary has no way to spell
                a control token in it as ordinary text.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes of one token, also where they are no valid UTF-8 alone."""
        ...

    def token_string(self, token_id: int) -> str:
        """One token as readable text (U+FFFD for bytes that are no character)."""
        ...

    def id_of(self, token: str) -> int | None:
        """The id of an added or vocabulary token given by its exact string."""
        ...

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """A detokenizer for output that follows `prompt_token_ids`."""
        ...


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None where it has none.

    Raises:
        ValueError: the file is there but cannot be read; the message names it.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        return load_hf_tokenizer(file)
    file = folder / "tokenizer.model"
    if file.is_file():
        return load_sentencepiece_tokenizer(file)
    return None
