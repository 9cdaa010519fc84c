"""Structured data: JSON, CSV, Markdown tables, YAML and look-ups in long lists."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.embedded_model.synthetic.chat import Exercise, chat_document, exercise_document
from tools.embedded_model.synthetic.language import enumeration, with_article
from tools.embedded_model.synthetic.lexicon import (
    ANIMALS,
    CITIES,
    CLOTHES,
    COLORS,
    FRUITS,
    FURNITURE,
    GIRLS,
    INSTRUMENTS,
    JOBS,
    NAMES,
    SPORTS,
    SURNAMES,
    TOOLS,
    WORDS,
)

Record = dict[str, Any]
_LANGUAGES = ("English", "French", "German", "Spanish", "Italian", "Japanese")
_PERSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
}


def random_person(rng: Random, num_fields: int | None = None) -> Record:
    """A made-up person with a name and, by default, one to four other fields."""
    name = rng.choice(NAMES)
    surname = " " + rng.choice(SURNAMES) if rng.random() < 0.5 else ""
    person: Record = {
        "name": name + surname,
        "age": rng.randint(8, 80),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "email": "",
        "married": rng.choice([True, False]),
        "hobby": rng.choice(SPORTS + INSTRUMENTS),
        "pet": rng.choice(["dog", "cat", "rabbit", "parrot"]),
    }
    num_languages = rng.randint(1, 3)
    person["languages"] = rng.sample(_LANGUAGES, num_languages)
    person["email"] = f"{name.lower()}{rng.randint(1, 99)}@example.com"
    fields = rng.sample(list(person), num_fields or rng.randint(2, 5))
    if "name" not in fields:
        fields[0] = "name"
    return {key: value for key, value in person.items() if key in fields}


def _short_person(rng: Random) -> Record:
    return {"name": rng.choice(NAMES), "age": rng.randint(8, 80), "city": rng.choice(CITIES)}


def _description(person: Record) -> str:
    """Describe a person in sentences; the name is the subject of the first one only."""
    is_female = person["name"].split()[0] in GIRLS
    subject, possessive = person["name"], person["name"] + "'s"
    sentences = []
    for key, value in person.items():
        if key == "name":
            continue
        sentences.append(_sentence(key, value, subject, possessive))
        subject, possessive = ("She", "Her") if is_female else ("He", "His")
    return " ".join(sentences) if sentences else f"The name is {person['name']}."


def _sentence(key: str, value: Any, subject: str, possessive: str) -> str:  # noqa: ANN401
    sentences: dict[str, Callable[[], str]] = {
        "age": lambda: f"{subject} is {value} years old.",
        "city": lambda: f"{subject} lives in {value}.",
        "job": lambda: f"{subject} works as {with_article(value)}.",
        "email": lambda: f"{possessive} email address is {value}.",
        "married": lambda: f"{subject} is {'married' if value else 'not married'}.",
        "hobby": lambda: f"{possessive} hobby is {value}.",
        "pet": lambda: f"{subject} has {with_article(value)}.",
        "languages": lambda: f"{subject} speaks {enumeration(value)}.",
    }
    return sentences[key]()


@dataclass(frozen=True)
class _Layout:
    """How an answer shows JSON."""

    indent: int | None
    is_fenced: bool

    def show(self, value: Any) -> str:  # noqa: ANN401
        if self.is_fenced:
            return f"```json\n{json.dumps(value, indent=self.indent or 2)}\n```"
        return json.dumps(value, indent=self.indent)


def structured_data(rng: Random) -> str:
    """Read, write or convert records."""
    kind = rng.choice(_CONVERSIONS)
    layout = _Layout(rng.choice([None, 2, 2]), is_fenced=rng.random() < 0.4)
    question, answer = kind(rng, layout)
    reasoning = (
        "The answer must be valid data in the requested form. I take the values from the text."
    )
    if kind is _make_up:
        reasoning = "I make up simple values for the fields."
    return exercise_document(rng, Exercise(question, answer, reasoning))


_Conversion = tuple[str, str]


def _extract(rng: Random, layout: _Layout) -> _Conversion:
    person = random_person(rng)
    text, keys = _description(person), ", ".join(person)
    questions = [
        f"Extract the data as JSON with the keys {keys}: {text}",
        f"Turn this into JSON ({keys}): {text}",
        f"Read the text and return a JSON object with the fields {keys}.\n\n{text}",
        f"Return JSON with {keys}.\n\nText: {text}",
    ]
    return rng.choice(questions), layout.show(person)


def _describe(rng: Random, _layout: _Layout) -> _Conversion:
    person = random_person(rng)
    record = json.dumps(person)
    questions = [
        f"Describe this person in a short text:\n{record}",
        f"Write sentences from this JSON:\n{record}",
    ]
    return rng.choice(questions), _description(person)


def _read_field(rng: Random, _layout: _Layout) -> _Conversion:
    person = random_person(rng)
    key = rng.choice(list(person))
    record = json.dumps(person)
    questions = [
        f'What is the value of "{key}" in this JSON?\n{record}',
        f"Get the field {key} from {record}",
    ]
    value = person[key]
    return rng.choice(questions), value if isinstance(value, str) else json.dumps(value)


def _convert_table(rng: Random, layout: _Layout) -> _Conversion:
    num_people = rng.randint(2, 4)
    # Unused draws: without them every later document of a seed would change.
    for _ in range(num_people):
        random_person(rng, 3)
    people = [_short_person(rng) for _ in range(num_people)]
    rows = [tuple(str(value) for value in person.values()) for person in people]
    csv = "\n".join(["name,age,city", *(",".join(row) for row in rows)])
    if rng.random() < 0.5:
        return f"Convert this CSV to JSON:\n\n{csv}", layout.show(people)
    if rng.random() < 0.5:
        return f"Convert this JSON to CSV:\n\n{json.dumps(people)}", csv
    table = ["| name | age | city |", "| --- | --- | --- |"]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    return f"Make a Markdown table from this CSV:\n\n{csv}", "\n".join(table)


def _write_yaml(rng: Random, _layout: _Layout) -> _Conversion:
    person = random_person(rng)
    record = json.dumps(person)
    questions = [f"Write this JSON as YAML:\n{record}", f"Convert to YAML:\n{record}"]
    lines = [
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in person.items()
    ]
    return rng.choice(questions), "\n".join(lines)


def _add_field(rng: Random, layout: _Layout) -> _Conversion:
    person = random_person(rng)
    key = rng.choice(WORDS)
    value = rng.choice([rng.randint(0, 99), rng.choice(COLORS), True])
    question = (
        f'Add the key "{key}" with the value {json.dumps(value)} to this JSON:\n'
        f"{json.dumps(person)}"
    )
    return question, layout.show({**person, key: value})


def _make_up(rng: Random, layout: _Layout) -> _Conversion:
    person = _short_person(rng)
    schema = json.dumps(_PERSON_SCHEMA)
    questions = [
        f"Return a JSON object for a person that matches this schema:\n{schema}",
        "Make up a person and return JSON with name, age and city.",
        "Give me a random person as JSON with the keys name, age and city.",
    ]
    return rng.choice(questions), layout.show(person)


_CONVERSIONS: tuple[Callable[[Random, _Layout], _Conversion], ...] = (
    *(_extract, _extract, _extract),
    _describe,
    _read_field,
    _convert_table,
    _write_yaml,
    _add_field,
    _make_up,
)


def lookup(rng: Random) -> str:
    """A list of 6 to 40 keys and values, and questions about some of them: recall over distance."""
    num_keys = rng.randint(6, 40)
    keys = rng.sample(WORDS + ANIMALS + FRUITS + FURNITURE + TOOLS + CLOTHES, num_keys)
    values = [rng.randint(10, 9999) for _ in keys]
    line = rng.choice(
        [
            "{key}: {value}",
            "{key} = {value}",
            "The code for {key} is {value}.",
            "- {key} -> {value}",
        ]
    )
    listed = "\n".join(
        line.format(key=key, value=value) for key, value in zip(keys, values, strict=True)
    )
    asked = keys[rng.randrange(num_keys)]
    lead = rng.choice(["Here is a list.", "Remember these values.", "Look at this table."])
    # A word can be in two of the lists: its first value counts.
    value = values[keys.index(asked)]
    is_sentence = rng.choice([True, False])
    turns = [f"{lead}\n\n{listed}\n\nWhat is the value of {asked}?"]
    turns.append(_value_answer(asked, value, is_sentence))
    for _ in range(rng.randint(0, 3)):
        i = rng.randrange(num_keys)
        questions = [
            f"And {keys[i]}?",
            f"What about {keys[i]}?",
            f"What is the value of {keys[i]}?",
        ]
        turns += [rng.choice(questions), _value_answer(keys[i], values[i], is_sentence)]
    return chat_document(rng, turns, "I look for the key in the list and read its value.")


def _value_answer(key: str, value: int, is_sentence: bool) -> str:
    return f"The value of {key} is {value}." if is_sentence else str(value)
