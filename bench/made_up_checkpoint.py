"""A folder that can be served with made-up weights: a geometry, a tokenizer, a chat layout."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.model_config import load_model_config
from server.bench.endpoint import WORDS

# Only the texts, one after the other: a prompt has as many tokens as words.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def save_made_up(geometry: Path, folder: Path) -> None:
    """Link the geometry's files into `folder` and add what text needs.

    The vocabulary has the model's size: the benchmark's words first, each one token, then
    numbered ones of about the length of real tokens. Every token has text.
    """
    for file in geometry.glob("*.json"):
        (folder / file.name).symlink_to(file.resolve())
    vocab_size = load_model_config(geometry).vocab_size
    tokens = [*WORDS, *(f"Ġ{number:x}" for number in range(vocab_size - len(WORDS)))][:vocab_size]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
