"""WordNet 3.0: dictionary entries, and meanings for the synthetic questions."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.embedded_model.sources.documents import Document
from tools.embedded_model.sources.filters import is_unwanted

_FILES = Path("x/wordnet-base/usr/share/wordnet")
# File suffix: (part of speech, digit of the part in a sense key)
_PARTS = {
    "noun": ("noun", "1"),
    "verb": ("verb", "2"),
    "adj": ("adjective", "3"),
    "adv": ("adverb", "4"),
}
_SATELLITE_ADJECTIVE = "5"
_SenseKey = tuple[str, str, str, str]


class Sense(NamedTuple):
    """One meaning of a word; `num_uses` counts them in the tagged texts."""

    word: str
    part_of_speech: str
    definition: str
    examples: list[str]
    synonyms: list[str]
    num_uses: int


def dictionary_entries(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """WordNet (its licence is permissive, the notice is kept): up to four senses of a word."""
    senses: dict[str, list[Sense]] = {}
    for sense in read_senses(folder, min_count=1):
        senses.setdefault(sense.word, []).append(sense)
    for word in sorted(senses):
        common = sorted(senses[word], key=lambda s: (s.num_uses, *s[1:5]), reverse=True)
        yield "\n".join([word, *map(_entry_line, common[:4])])


def _entry_line(sense: Sense) -> str:
    line = f"({sense.part_of_speech}) {_capital(sense.definition)}."
    if sense.examples:
        line += f' Example: "{_capital(sense.examples[0])}"'
    if sense.synonyms:
        line += f" Synonyms: {', '.join(sense.synonyms[:4])}."
    return line


def common_meanings(folder: Path) -> list[Sense]:
    """The most common sense of short, common words, sorted by word."""
    best: dict[str, Sense] = {}
    for sense in read_senses(folder, min_count=8):
        if not re.match(r"^[a-z]{3,12}$", sense.word) or len(sense.definition) >= 110:
            continue
        if sense.word not in best or sense.num_uses > best[sense.word].num_uses:
            best[sense.word] = sense
    return sorted(best.values())


def read_senses(folder: Path, min_count: int) -> list[Sense]:
    """Every sense that the tagged texts use at least `min_count` times, in file order."""
    counts = _read_counts(folder)
    senses = []
    for suffix, (part, digit) in _PARTS.items():
        for line in _read_lines(folder / _FILES / f"data.{suffix}"):
            head, _, gloss = line.partition(" | ")
            if line.startswith("  ") or is_unwanted(gloss):
                continue
            fields = head.split()
            file_number, num_words = fields[1], int(fields[3], 16)
            words = fields[4 : 4 + 2 * num_words : 2]
            sense_ids = fields[5 : 5 + 2 * num_words : 2]
            definition, examples = _split_gloss(gloss)
            for word, sense_id in zip(words, sense_ids, strict=True):
                plain = _without_marker(word)
                key = (plain.lower(), digit, f"{int(sense_id, 16):02d}", file_number)
                num_uses = counts[key]
                if suffix == "adj":
                    num_uses = max(num_uses, counts[key[0], _SATELLITE_ADJECTIVE, *key[2:]])
                if num_uses < min_count or not plain.isascii():
                    continue
                synonyms = [_spaced(_without_marker(other)) for other in words if other != word]
                senses.append(Sense(_spaced(plain), part, definition, examples, synonyms, num_uses))
    return senses


def _read_counts(folder: Path) -> Counter[_SenseKey]:
    """How often a sense is used, by (lemma, part digit, sense id, file number)."""
    counts: Counter[_SenseKey] = Counter()
    for line in _read_lines(folder / _FILES / "cntlist.rev"):
        sense_key, _, count = line.split()
        lemma, rest = sense_key.split("%")
        part, file_number, sense_id = rest.split(":")[:3]
        counts[lemma, part, sense_id, file_number] += int(count)
    return counts


def _read_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="latin-1") as lines:
        yield from lines


def _split_gloss(gloss: str) -> tuple[str, list[str]]:
    """Split a gloss into the definition and the quoted examples after it."""
    definition, *rest = (part.strip() for part in re.split(r";\s*(?=\")", gloss.strip()))
    examples = [part.strip('" ;') for part in rest if part.startswith('"')]
    return definition.strip().rstrip(";"), examples


def _without_marker(word: str) -> str:
    """Drop the syntactic marker of an adjective, as in "galore(ip)"."""
    return re.sub(r"\(.*?\)", "", word)


def _spaced(word: str) -> str:
    return word.replace("_", " ")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
