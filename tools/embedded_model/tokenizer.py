"""The byte-level BPE tokenizer of the embedded model."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
_SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Part of the text that the model writes, unlike the special ones.
_MARKER_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
NUM_ADDED_TOKENS = len(_SPECIAL_TOKENS) + len(_MARKER_TOKENS)
# Words, single digits, runs of punctuation and white space.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BATCH = 2000


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on texts; the added tokens take the last ids of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_ADDED_TOKENS,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    for tokens, is_special in ((_SPECIAL_TOKENS, True), (_MARKER_TOKENS, False)):
        added = [AddedToken(token, special=is_special, normalized=False) for token in tokens]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> NDArray[np.uint16]:
    """Encode and join documents, each one ended by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    rows = []
    for start in range(0, len(documents), _BATCH):
        batch = list(documents[start : start + _BATCH])
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            rows.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(rows)
