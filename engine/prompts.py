"""What `LLM` takes as prompts: one, or several, made a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [item for item in prompts if isinstance(item, int)]
    several = [item for item in prompts if not isinstance(item, int)]
    if ids and several:
        raise ValueError("prompts must be texts and lists of token ids, or one list of token ids")
    return [ids] if ids else several


def list_conversations(messages: Messages | Sequence[Messages]) -> list[list[dict[str, Any]]]:
    """One conversation, or several, as a list of lists of messages."""
    one = [item for item in messages if isinstance(item, dict)]
    several = [list(item) for item in messages if not isinstance(item, dict)]
    if one and several:
        raise ValueError("messages must be one conversation or a list of conversations")
    return [one] if one else several
