"""The hand-written word lists and facts, read once from data/."""

import tomllib
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"


def read_table(name: str) -> dict[str, Any]:
    """Read data/<name>.toml."""
    return tomllib.loads((DATA / f"{name}.toml").read_text())


def read_rows(name: str) -> tuple[tuple[str, ...], ...]:
    """Read data/<name>.txt: one entry a line, its fields between bars."""
    lines = (DATA / f"{name}.txt").read_text().splitlines()
    return tuple(tuple(line.split(" | ")) for line in lines)


def _pairs(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((first, second) for first, second in read_rows(name))


_TABLE = read_table("lexicon")

GIRLS: tuple[str, ...] = tuple(_TABLE["girls"])
BOYS: tuple[str, ...] = tuple(_TABLE["boys"])
NAMES = GIRLS + BOYS
SURNAMES: tuple[str, ...] = tuple(_TABLE["surnames"])
STORY_ANIMALS: tuple[str, ...] = tuple(_TABLE["story_animals"])
WORDS: tuple[str, ...] = tuple(_TABLE["words"])
MONTHS: tuple[str, ...] = tuple(_TABLE["months"])
MONTH_LENGTHS: tuple[int, ...] = tuple(_TABLE["month_lengths"])
WEEKDAYS: tuple[str, ...] = tuple(_TABLE["weekdays"])
SMALL_NUMBERS: tuple[str, ...] = tuple(_TABLE["small_numbers"])
TENS: tuple[str, ...] = tuple(_TABLE["tens"])
ORDINALS: tuple[str, ...] = tuple(_TABLE["ordinals"])
FUNCTION_VERBS: tuple[str, ...] = tuple(_TABLE["function_verbs"])
FUNCTION_NOUNS: tuple[str, ...] = tuple(_TABLE["function_nouns"])

ANTONYMS: tuple[tuple[str, str], ...] = tuple((a, b) for a, b in _TABLE["antonyms"])
SYNONYMS: tuple[tuple[str, str], ...] = tuple((a, b) for a, b in _TABLE["synonyms"])
PLURALS: tuple[tuple[str, str], ...] = tuple((a, b) for a, b in _TABLE["plurals"])
PAST_TENSES: tuple[tuple[str, str], ...] = tuple((a, b) for a, b in _TABLE["past_tenses"])
ELEMENTS: tuple[tuple[str, str, str], ...] = tuple((n, s, z) for n, s, z in _TABLE["elements"])
UNITS: tuple[tuple[str, str, int], ...] = tuple((u, v, f) for u, v, f in _TABLE["units"])
COLOR_MIXES: tuple[tuple[str, str, str], ...] = tuple(
    (a, b, mix) for a, b, mix in _TABLE["color_mixes"]
)

CATEGORIES: dict[str, tuple[str, ...]] = {k: tuple(v) for k, v in _TABLE["categories"].items()}
CATEGORY_MEMBERS: dict[str, str] = _TABLE["category_members"]
ANIMALS = CATEGORIES["animals"]
FRUITS = CATEGORIES["fruits"]
VEGETABLES = CATEGORIES["vegetables"]
COLORS = CATEGORIES["colors"]
TOOLS = CATEGORIES["tools"]
CLOTHES = CATEGORIES["clothes"]
FURNITURE = CATEGORIES["pieces of furniture"]
VEHICLES = CATEGORIES["vehicles"]
INSTRUMENTS = CATEGORIES["musical instruments"]
SPORTS = CATEGORIES["sports"]
FOODS = CATEGORIES["foods"]
CITIES = CATEGORIES["cities"]
JOBS = CATEGORIES["jobs"]

ANIMAL_SOUNDS: dict[str, str] = _TABLE["animal_sounds"]
ANIMAL_BABIES: dict[str, str] = _TABLE["animal_babies"]
ANIMAL_HOMES: dict[str, str] = _TABLE["animal_homes"]
LEG_COUNTS: dict[str, int] = _TABLE["leg_counts"]
TRANSLATIONS: dict[str, dict[str, str]] = _TABLE["translations"]

QUESTIONS = _pairs("questions")
EXPLANATIONS = _pairs("explanations")
INSTRUCTIONS = read_rows("instructions")
JOKES = _pairs("jokes")
RIDDLES = _pairs("riddles")
