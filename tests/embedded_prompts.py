"""Chats for the embedded model that it was not trained on, as token ids."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tools.embedded_model.prompts import fresh_prompts

EMBEDDED = Path(__file__).parents[1] / "server" / "embedded"
END_IDS = (8185, 8183)  # <|im_end|> and <|endoftext|>


def fresh_prompt_ids(count: int, seed: int) -> list[list[int]]:
    """Prompts from the generator of the training documents, under seeds that training never drew.

    Each ends where the answer is due, half of them with an empty think block.
    """
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    encodings = tokenizer.encode_batch(fresh_prompts(seed, count), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]
