"""Chats around one or a few questions: system line, reasoning and variations of a request."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tools.embedded_model.render import Message, render
from tools.embedded_model.synthetic.language import uncapital
from tools.embedded_model.synthetic.lexicon import read_table

Topic = Callable[[Random], str]
SYSTEM_LINES: tuple[str, ...] = tuple(read_table("smalltalk")["system_lines"])
_NO_PLEASE = re.compile(
    r"(I |What|How|Why|Who|Where|Is|Can|Do|Which|When|Please|If|Hello|Hi|My|In |At |There)"
)


@dataclass(frozen=True)
class Exercise:
    """A question, its exact answer and the steps that lead there ("" for none)."""

    question: str
    answer: str
    reasoning: str = ""


def chat_document(rng: Random, turns: Sequence[str], reasoning: str = "") -> str:
    """Render turns of user, assistant, user, ...; half of the documents reason at the end."""
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_LINES)})
    for i, turn in enumerate(turns):
        messages.append({"role": "user" if i % 2 == 0 else "assistant", "content": turn})
    if rng.random() < 0.5:
        messages[-1]["reasoning"] = reasoning or _plain_reasoning(rng, turns[-2])
    return render(messages)


def exercise_document(rng: Random, exercise: Exercise) -> str:
    """Render one exercise as a chat, its question as it is."""
    return chat_document(rng, [exercise.question, exercise.answer], exercise.reasoning)


def request_variant(rng: Random, request: str) -> str:
    """Vary a request as people do: a greeting, a please, a small first letter, no full stop.

    A request without an end mark can get its last letter twice ("12+77" for "12+7"): the
    published model has seen that, so it stays.
    """
    x = rng.random()
    if x < 0.12:
        return request if _NO_PLEASE.match(request) else "Please " + uncapital(request)
    if x < 0.2:
        last = request[-1]
        ending = ", please" + last if last in ".?" else last
        return request.rstrip(".?!") + ending
    if x < 0.28:
        return request if request.startswith("I") else uncapital(request)
    if x < 0.36 and request[-1] in ".?":
        return request[:-1]
    if x < 0.42:
        return rng.choice(["Hi! ", "Hello! ", "Hey! "]) + request
    return request


def _plain_reasoning(rng: Random, request: str) -> str:
    line = request.split("\n")[0].strip()
    if len(line) >= 80:
        line = line[:60].rsplit(" ", 1)[0] + " ..."
    return rng.choice(
        [
            f'The user says: "{line}" I will give a short and friendly answer.',
            f'The user asks: "{line}" I should answer clearly.',
            "This is a simple request. I can answer it directly.",
        ]
    )
