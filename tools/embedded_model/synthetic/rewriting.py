"""Made-up sentences, to be copied or changed exactly."""

import json
import re
from collections.abc import Callable
from random import Random

from tools.embedded_model.synthetic.chat import Exercise, exercise_document
from tools.embedded_model.synthetic.code import random_function
from tools.embedded_model.synthetic.language import Word
from tools.embedded_model.synthetic.lexicon import (
    ANIMALS,
    CITIES,
    CLOTHES,
    COLORS,
    FOODS,
    FRUITS,
    FURNITURE,
    INSTRUMENTS,
    JOBS,
    MONTHS,
    NAMES,
    SPORTS,
    VEGETABLES,
    VEHICLES,
    WEEKDAYS,
    WORDS,
)
from tools.embedded_model.synthetic.records import random_person

_SENTENCES = (
    "{name} went to the market and bought {fruit:a} and {vegetable:a}.",
    "The {color} {vehicle} stopped in front of the old house.",
    "{name} is {job:a} and lives in {city}.",
    "Every morning {name} feeds the {animal} and the {animal}.",
    "The {animal} slept under the {furniture} all day.",
    "On {weekday} {name} plays {sport} with friends.",
    "It was cold, so {name} put on {clothes:a}.",
    "{name} can play the {instrument} very well.",
    "We ate {food} with {food} and drank some water.",
    "{name} found {color:a} {treasure} near the {spot}.",
    "In {month} the days are long and the {green} is green.",
    "{name} wrote a letter to {friend} and sent it on {weekday}.",
)
_FIELDS: dict[str, tuple[str, ...]] = {
    "fruit": FRUITS,
    "vegetable": VEGETABLES,
    "color": COLORS,
    "vehicle": VEHICLES,
    "job": JOBS,
    "city": CITIES,
    "animal": ANIMALS,
    "furniture": FURNITURE,
    "weekday": WEEKDAYS,
    "sport": SPORTS,
    "clothes": CLOTHES,
    "instrument": INSTRUMENTS,
    "food": FOODS,
    "treasure": ("coin", "stone", "feather", "shell", "box"),
    "spot": ("river", "lake", "bridge", "school"),
    "month": MONTHS,
    "green": ("garden", "park", "forest"),
    "friend": NAMES,
}
_FIELD = re.compile(r"\{(\w+)(?::(\w+))?\}")


def sentence(rng: Random) -> str:
    """One made-up sentence."""
    name = rng.choice(NAMES)

    def drawn(field: re.Match[str]) -> str:
        key, spec = field.groups(default="")
        return format(Word(name if key == "name" else rng.choice(_FIELDS[key])), spec)

    return _FIELD.sub(drawn, rng.choice(_SENTENCES))


def copying(rng: Random) -> str:
    """A text to be repeated as it is."""
    text = rng.choice(_TEXTS)(rng)
    question = rng.choice(
        [
            "Repeat after me: {text}",
            "Copy this text exactly: {text}",
            "Say this: {text}",
            "Repeat the following text:\n\n{text}",
            "Please write this again, without any change:\n\n{text}",
            "Echo: {text}",
        ]
    ).format(text=text)
    return exercise_document(
        rng, Exercise(question, text, "I just have to repeat the text exactly.")
    )


def _sentences(rng: Random) -> str:
    num_sentences = rng.randint(1, 4)
    return " ".join(sentence(rng) for _ in range(num_sentences))


def _record(rng: Random) -> str:
    person = random_person(rng)
    return json.dumps(person, indent=rng.choice([None, 2]))


def _loose_words(rng: Random) -> str:
    num_words = rng.randint(3, 12)
    return " ".join(rng.sample(WORDS, num_words))


def _loose_numbers(rng: Random) -> str:
    num_numbers = rng.randint(3, 12)
    return " ".join(str(rng.randint(0, 999)) for _ in range(num_numbers))


def _loose_letters(rng: Random) -> str:
    num_letters = rng.randint(4, 16)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(num_letters))


def _function(rng: Random) -> str:
    return random_function(rng).source


_TEXTS: tuple[Callable[[Random], str], ...] = (
    _sentences,
    _record,
    _loose_words,
    _loose_numbers,
    _loose_letters,
    _function,
)


def rewriting(rng: Random) -> str:
    """A sentence to be changed in one exact way."""
    text = sentence(rng)
    change = rng.choice(_CHANGES)(rng, text)
    if change is None:
        return copying(rng)
    reasoning = "I change only what the user asks for and keep the rest of the text."
    return exercise_document(rng, Exercise(*change, reasoning))


_Change = tuple[str, str]


def _punctuate(rng: Random, text: str) -> _Change:
    # An unused draw: without it every later document of a seed would change.
    rng.randrange(len(text.split()))
    bare = text.lower().replace(".", "").replace(",", "")
    questions = [
        f"Fix the capitalization and punctuation: {bare}",
        f"Correct this sentence: {bare}",
    ]
    return rng.choice(questions), text


def _correct_spelling(rng: Random, text: str) -> _Change | None:
    """Swap two letters inside a word; None if the word drawn is too short for that."""
    words = text.split()
    i = rng.randint(1, len(words) - 1)
    word = words[i]
    if len(word) < 4:
        return None
    j = rng.randint(0, len(word) - 3)
    words[i] = word[:j] + word[j + 1] + word[j] + word[j + 2 :]
    misspelled = " ".join(words)
    questions = [
        f"Fix the spelling mistake: {misspelled}",
        f"Correct the spelling: {misspelled}",
        f"There is a typo in this sentence. Fix it: {misspelled}",
    ]
    return rng.choice(questions), text


def _uppercase(rng: Random, text: str) -> _Change:
    questions = [f"Write this in uppercase: {text}", f"Convert to uppercase: {text}"]
    return rng.choice(questions), text.upper()


def _lowercase(rng: Random, text: str) -> _Change:
    questions = [f"Write this in lowercase: {text}", f"Convert to lowercase: {text}"]
    return rng.choice(questions), text.lower()


def _replace_word(rng: Random, text: str) -> _Change:
    old = rng.choice([word.strip(".,") for word in text.split() if len(word) > 3])
    new = rng.choice(WORDS)
    question = f'Replace "{old}" with "{new}" in this sentence: {text}'
    return question, re.sub(rf"\b{re.escape(old)}\b", new, text)


def _reverse_words(_rng: Random, text: str) -> _Change:
    question = f"Write the words of this sentence in reverse order: {text}"
    return question, " ".join(text.rstrip(".").split()[::-1])


def _rewrite_date(rng: Random, _text: str) -> _Change:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1950, 2030)
    digits, words = f"{year}-{month:02d}-{day:02d}", f"{MONTHS[month - 1]} {day}, {year}"
    questions = [
        f"Write the date {digits} in words.",
        f"Convert the date {digits} to the form Month Day, Year.",
    ]
    question = rng.choice(questions)
    if rng.random() < 0.5:
        return f"Convert the date {words} to the form YYYY-MM-DD.", digits
    return question, words


def _split_sentences(rng: Random, _text: str) -> _Change:
    num_sentences = rng.randint(2, 4)
    sentences = [sentence(rng) for _ in range(num_sentences)]
    text = " ".join(sentences)
    template, bullet = rng.choice(
        [
            ("Write each sentence on its own line: {text}", ""),
            ("Make a bullet list of these sentences: {text}", "- "),
        ]
    )
    return template.format(text=text), "\n".join(bullet + line for line in sentences)


_CHANGES: tuple[Callable[[Random, str], _Change | None], ...] = (
    _punctuate,
    _correct_spelling,
    _uppercase,
    _lowercase,
    _replace_word,
    _reverse_words,
    _rewrite_date,
    _split_sentences,
)
