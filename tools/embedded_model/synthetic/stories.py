"""Simple stories from a grammar with a consistent state, and questions with exact answers."""

from dataclasses import dataclass
from random import Random
from typing import Any

from tools.embedded_model.synthetic.language import Word
from tools.embedded_model.synthetic.lexicon import BOYS, GIRLS, STORY_ANIMALS, read_table

_GRAMMAR = read_table("stories")
_Slot = str | list[str] | dict[str, Any]


@dataclass(frozen=True)
class Hero:
    """Who a story is about."""

    name: str
    kind: str
    trait: str


@dataclass(frozen=True)
class Story:
    """A story with what it is about, its lesson and (question, answer) pairs about it."""

    hero: Hero
    text: str
    theme: str
    moral: str
    questions: list[tuple[str, str]]


def tell_story(rng: Random, name: str | None = None, kind: str | None = None) -> Story:
    """Make up a story; a hero of kind "girl" or "boy" follows the gender of the name."""
    words = _characters(rng, name, kind)
    plot = rng.choice(_GRAMMAR["plots"])
    for draw in plot["draws"]:
        _draw_words(rng, draw, words)
    paragraphs = [
        " ".join(sentence for slot in slots for sentence in _sentences(rng, slot, words))
        for slots in plot["paragraphs"]
    ]
    questions = [
        (
            f"What is the name of the {words['kind']}?",
            f"The {words['kind']} is called {words['name']}.",
        ),
        (f"Where did {words['name']} live?", f"{words['name']} lived in {words['place']}."),
    ]
    questions += [(q.format_map(words), a.format_map(words)) for q, a in plot["questions"]]
    return Story(
        Hero(words["name"], words["kind"], words["trait"]),
        "\n\n".join(paragraphs).replace("..", "."),
        plot["theme"].format_map(words),
        plot["moral"],
        questions,
    )


def _characters(rng: Random, name: str | None, kind: str | None) -> dict[str, Word]:
    """Draw hero, friend and place: the words that the sentences of every plot use."""
    is_female = rng.random() < 0.5
    if name:
        is_female = name in GIRLS
    else:
        name = rng.choice(GIRLS if is_female else BOYS)
    child = "girl" if is_female else "boy"
    if not kind:
        kind = rng.choice(STORY_ANIMALS) if rng.random() < 0.6 else child
    elif kind in ("girl", "boy"):
        kind = child
    he, his, him = ("she", "her", "her") if is_female else ("he", "his", "him")
    is_friend_female = rng.random() < 0.5
    friend = rng.choice([x for x in (GIRLS if is_friend_female else BOYS) if x != name])
    friend_kind = rng.choice([x for x in STORY_ANIMALS if x != kind])
    friend_he, friend_his = ("she", "her") if is_friend_female else ("he", "his")
    trait = rng.choice(_GRAMMAR["traits"])
    words = {
        "name": name,
        "kind": kind,
        "trait": trait,
        "hero": f"{trait} {kind}",
        "place": rng.choice(_GRAMMAR["places"]),
        "he": he,
        "his": his,
        "him": him,
        "friend": friend,
        "friend_kind": friend_kind,
        "friend_he": friend_he,
        "friend_his": friend_his,
    }
    return {key: Word(word) for key, word in words.items()}


def _draw_words(rng: Random, draw: dict[str, Any], words: dict[str, Word]) -> None:
    """Choose one entry, or sample one for each name; an entry of n words has n names."""
    if "choose" in draw:
        drawn = [(draw["choose"], rng.choice(draw["from"]))]
    else:
        drawn = list(
            zip(draw["sample"], rng.sample(draw["from"], len(draw["sample"])), strict=True)
        )
    for names, entry in drawn:
        if isinstance(names, str):
            words[names] = Word(entry)
        else:
            words.update(zip(names, map(Word, entry), strict=True))


def _sentences(rng: Random, slot: _Slot, words: dict[str, Word]) -> list[str]:
    if slot == "introduction":
        return _introduction(rng, words)
    options: list[str]
    if isinstance(slot, dict):
        _draw_words(rng, slot, words)
        options = slot["say"]
    elif isinstance(slot, str):
        options = _GRAMMAR["shared"][slot]
    else:
        options = slot
    return [rng.choice(options).format_map(words)]


def _introduction(rng: Random, words: dict[str, Word]) -> list[str]:
    parts: dict[str, _Slot] = _GRAMMAR["introduction"]
    sentences = _sentences(rng, parts["openings"], words)
    if words["place"] not in sentences[0]:
        sentences += _sentences(rng, parts["homes"], words)
    if rng.random() < 0.7:
        sentences += _sentences(rng, parts["habits"], words)
    return sentences
