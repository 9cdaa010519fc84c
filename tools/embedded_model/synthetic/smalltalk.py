"""Greetings, small talk and chats in which something told earlier is asked for."""

from collections.abc import Callable
from random import Random

from tools.embedded_model.synthetic.chat import chat_document
from tools.embedded_model.synthetic.language import fill, with_article
from tools.embedded_model.synthetic.lexicon import (
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    JOBS,
    JOKES,
    NAMES,
    SPORTS,
    read_table,
)

_TABLE = read_table("smalltalk")
_EXCHANGES: dict[str, dict[str, list[str]]] = _TABLE["exchanges"]
_REPLIES: dict[str, list[str]] = _TABLE["greeting_replies"]
_MEMORIES: dict[str, dict[str, list[str]]] = _TABLE["memories"]
_ANSWERS: dict[str, str] = {key: memory["answer"] for key, memory in _TABLE["memories"].items()}


def greeting(rng: Random) -> str:
    """A greeting, sometimes followed by small talk."""
    hello = rng.choice(_TABLE["greetings"])
    reply = rng.choice(_REPLIES["any"])
    for time_of_day in ("morning", "evening"):
        if time_of_day in hello:
            reply = rng.choice(_REPLIES[time_of_day])
    turns = [hello, reply]
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        turns += small_exchange(rng)
    reasoning = ""
    if len(turns) == 2:
        reasoning = rng.choice(
            [
                "The user greets me. I will greet them and offer help.",
                "This is a greeting. A friendly reply is enough.",
            ]
        )
    return chat_document(rng, turns, reasoning)


def small_talk(rng: Random) -> str:
    """One to four exchanges of small talk."""
    turns: list[str] = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        turns += small_exchange(rng)
    return chat_document(rng, turns)


def small_exchange(rng: Random) -> list[str]:
    """One line of a user and the reply."""
    return rng.choice(_KINDS)(rng)


def remembered(rng: Random) -> str:
    """The user tells facts about himself or herself and asks for them later."""
    values = {
        "name": rng.choice(NAMES),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "pet": rng.choice(["dog", "cat", "rabbit", "parrot", "hamster"]),
        "color": rng.choice(COLORS),
        "age": str(rng.randint(8, 70)),
    }
    questions = {
        key: rng.choice(memory["questions"])
        if len(memory["questions"]) > 1
        else memory["questions"][0]
        for key, memory in _MEMORIES.items()
    }

    def said(key: str, kind: str) -> str:
        return fill(rng.choice(_MEMORIES[key][kind]), {"value": values[key]})

    keys = rng.sample(list(values), rng.randint(1, 4))
    turns: list[str] = []
    if rng.random() < 0.4:
        turns = [" ".join(said(key, "told") for key in keys)]
        turns.append(rng.choice(_TABLE["acknowledgements"]))
    else:
        for key in keys:
            turns += [said(key, "told"), said(key, "replies")]
    if rng.random() < 0.4:
        turns += small_exchange(rng)
    rng.shuffle(keys)
    for key in keys[: rng.randint(1, len(keys))]:
        turns += [questions[key], fill(_ANSWERS[key], {"value": values[key]})]
    return chat_document(rng, turns, f"The user told me this earlier. {turns[-1]}")


def _fixed(name: str) -> Callable[[Random], list[str]]:
    def exchange(rng: Random) -> list[str]:
        return [rng.choice(_EXCHANGES[name]["user"]), rng.choice(_EXCHANGES[name]["assistant"])]

    return exchange


def _favorite(rng: Random) -> list[str]:
    topic = rng.choice(["color", "food", "animal", "season", "book", "sport"])
    favorite = {
        "color": rng.choice(COLORS),
        "food": rng.choice(FOODS),
        "animal": rng.choice(ANIMALS),
        "season": rng.choice(["spring", "summer", "autumn", "winter"]),
        "book": rng.choice(["Emma", "Hamlet", "Pride and Prejudice"]),
        "sport": rng.choice(SPORTS),
    }[topic]
    replies = [
        f"I am a program, so I do not have a real favorite, but I like the idea of {favorite}.",
        f"If I could choose, I would say {favorite}. What is yours?",
    ]
    return [f"What is your favorite {topic}?", rng.choice(replies)]


def _joke(rng: Random) -> list[str]:
    setup, punchline = rng.choice(JOKES)
    request = rng.choice(["Tell me a joke.", "Do you know a joke?", "Make me laugh."])
    return [request, f"{setup} {punchline}"]


def _introduction(rng: Random) -> list[str]:
    name, job = rng.choice(NAMES), rng.choice(JOBS)
    told = [f"My name is {name}.", f"I am {name} and I am {with_article(job)}.", f"Hi, I'm {name}."]
    replies = [
        f"Nice to meet you, {name}! How can I help you today?",
        f"Hello {name}, it is nice to meet you.",
    ]
    return [rng.choice(told), rng.choice(replies)]


_KINDS: tuple[Callable[[Random], list[str]], ...] = (
    _fixed("mood"),
    _fixed("identity"),
    _fixed("thanks"),
    _fixed("goodbye"),
    _favorite,
    _fixed("tired"),
    _fixed("happy"),
    _fixed("sad"),
    _fixed("bored"),
    _joke,
    _fixed("help"),
    _introduction,
    _fixed("abilities"),
    _fixed("weather"),
)
