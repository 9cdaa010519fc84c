"""The stream of synthetic documents: every kind with its share, drawn from a seed."""

from collections.abc import Iterator
from functools import partial
from random import Random

from tools.embedded_model.facts import Facts
from tools.embedded_model.synthetic.arithmetic import arithmetic
from tools.embedded_model.synthetic.chat import Topic
from tools.embedded_model.synthetic.code import programming, random_function
from tools.embedded_model.synthetic.knowledge import (
    explanation,
    general_knowledge,
    geography,
    instructions,
    word_meaning,
)
from tools.embedded_model.synthetic.lexicon import QUESTIONS
from tools.embedded_model.synthetic.lists import classification, item_list, membership
from tools.embedded_model.synthetic.reading import reading, story_chat, summary
from tools.embedded_model.synthetic.records import lookup, structured_data
from tools.embedded_model.synthetic.rewriting import copying, rewriting, sentence
from tools.embedded_model.synthetic.smalltalk import greeting, remembered, small_talk
from tools.embedded_model.synthetic.stories import tell_story
from tools.embedded_model.synthetic.tool_chats import tool_chat
from tools.embedded_model.synthetic.words import word_exercise
from tools.embedded_model.synthetic.writing import email, jokes, poem


def synthetic_documents(seed: int | str, facts: Facts) -> Iterator[str]:
    """Yield documents without end; the same seed and facts give the same documents.

    A document is a rendered chat or, for completions, plain text; about 500 bytes on average.
    """
    rng = Random(seed)
    topics = topics_with_weights(facts)
    functions, weights = list(topics), list(topics.values())
    while True:
        yield rng.choices(functions, weights)[0](rng)


def topics_with_weights(facts: Facts) -> dict[Topic, int]:
    """Every kind of document with its share, in the order that seeds rely on."""
    return {
        greeting: 3,
        small_talk: 6,
        remembered: 4,
        story_chat: 12,
        reading: 6,
        arithmetic: 10,
        word_exercise: 8,
        copying: 4,
        rewriting: 4,
        structured_data: 7,
        lookup: 2,
        general_knowledge: 7,
        partial(geography, facts=facts): 5,
        partial(word_meaning, facts=facts): 6,
        explanation: 4,
        instructions: 4,
        item_list: 5,
        classification: 3,
        membership: 1,
        poem: 2,
        jokes: 2,
        email: 3,
        summary: 2,
        programming: 12,
        tool_chat: 5,
        plain_text: 6,
    }


def plain_text(rng: Random) -> str:
    """Text without the marks of a chat: a story, sentences, functions or questions."""
    kind = rng.randint(0, 4)
    if kind <= 1:
        return tell_story(rng).text + "\n"
    if kind == 2:
        num_sentences = rng.randint(3, 10)
        return " ".join(sentence(rng) for _ in range(num_sentences)) + "\n"
    if kind == 3:
        num_functions = rng.randint(1, 4)
        return "\n\n\n".join(random_function(rng).source for _ in range(num_functions)) + "\n"
    num_questions = rng.randint(2, 5)
    pairs = rng.sample(QUESTIONS, num_questions)
    return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs) + "\n"
