"""Facts about countries and words that the synthetic documents ask for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTS_PATH = Path(__file__).parent / "data" / "facts.json"


@dataclass(frozen=True)
class Country:
    """A country; what its source does not tell is None."""

    name: str
    capital: str
    continent: str | None
    currency: str | None
    language: str | None


@dataclass(frozen=True)
class Meaning:
    """The most common meaning of a word."""

    word: str
    part_of_speech: str
    definition: str
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Everything that the synthetic documents take from outside sources."""

    countries: tuple[Country, ...]
    meanings: tuple[Meaning, ...]


def read_facts(path: Path = FACTS_PATH) -> Facts:
    """Read a facts file as `build` writes it."""
    return facts_from_json(json.loads(path.read_text()))


def facts_from_json(data: dict[str, Any]) -> Facts:
    """Build facts from {"countries": [{name, capital, ...}], "words": [[word, part, ...]]}."""
    countries = tuple(
        Country(
            entry["name"],
            entry["capital"],
            entry.get("continent"),
            entry.get("currency"),
            entry.get("language"),
        )
        for entry in data["countries"]
    )
    meanings = tuple(
        Meaning(word, part, definition, tuple(examples))
        for word, part, definition, examples, _synonyms, _count in data["words"]
    )
    return Facts(countries, meanings)
