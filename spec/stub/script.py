"""Known outputs by prompt, from a file of JSON lines; nothing here knows of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

MAX_SCRIPT_BYTES = 64 * 2**20

TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
Script = Mapping[TokenIds, TokenIds]
"""Output token ids by prompt token ids."""


class ScriptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file: a prompt and what a greedy run made of it."""

    prompt_token_ids: TokenIds
    output_token_ids: TokenIds


def read_script(path: Path, vocab_size: int, *, max_bytes: int = MAX_SCRIPT_BYTES) -> Script:
    """The outputs in the file at `path`; empty lines are skipped.

    Raises:
        ValueError: the file is absent, larger than `max_bytes`, has a line of another form, a
            token outside the vocabulary, or two outputs for one prompt; names flag and line.
    """
    place = f"--speculative-draft-model-path {path}"
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{place}: {error.strerror}; a file of JSON lines is expected") from error
    if len(content) > max_bytes:
        raise ValueError(f"{place}: larger than {max_bytes} bytes")
    script: dict[TokenIds, TokenIds] = {}
    decoder = msgspec.json.Decoder(ScriptLine)
    for number, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"{place}, line {number}: {error}") from error
        if max(line.prompt_token_ids + line.output_token_ids, default=0) >= vocab_size:
            raise ValueError(f"{place}, line {number}: a token id is not below {vocab_size}")
        if script.setdefault(line.prompt_token_ids, line.output_token_ids) != line.output_token_ids:
            raise ValueError(f"{place}, line {number}: another output for a prompt seen before")
    return script
