"""Words and personal data that keep a text out of the training set."""

import re
from pathlib import Path

_WORDS_PATH = Path(__file__).parent.parent / "data" / "unwanted_words.txt"
# One regular expression a line, rough on purpose: a lost text costs nothing.
_UNWANTED = re.compile(rf"\b({'|'.join(_WORDS_PATH.read_text().splitlines())})\b", re.IGNORECASE)
_PERSONAL = re.compile(
    r"[\w.+-]+@[\w-]+\.\w+|\b\d{3}[-. ]?\d{3}[-. ]?\d{4}\b|https?://|www\.|\.com\b|snapchat|"
    r"instagram|facebook|phone number|\b\d{4,}\b|last name|address",
    re.IGNORECASE,
)


def is_unwanted(text: str) -> bool:
    """Whether the text has a word that a demo model should not learn."""
    return _UNWANTED.search(text) is not None


def is_personal(text: str) -> bool:
    """Whether the text looks as if it held an address, a number or a link of a person."""
    return _PERSONAL.search(text) is not None
