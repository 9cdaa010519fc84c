"""Questions about facts: general knowledge, countries, words, explanations, instructions."""

import re
from collections.abc import Callable
from random import Random

from tools.embedded_model.facts import Country, Facts, Meaning
from tools.embedded_model.synthetic.chat import chat_document, request_variant
from tools.embedded_model.synthetic.language import (
    capital,
    number_words,
    ordinal,
    uncapital,
    with_article,
)
from tools.embedded_model.synthetic.lexicon import (
    ANIMAL_BABIES,
    ANIMAL_HOMES,
    ANIMAL_SOUNDS,
    COLOR_MIXES,
    ELEMENTS,
    EXPLANATIONS,
    INSTRUCTIONS,
    LEG_COUNTS,
    MONTH_LENGTHS,
    MONTHS,
    QUESTIONS,
    WEEKDAYS,
)

_Pair = tuple[str, str]


def general_knowledge(rng: Random) -> str:
    """One to three questions of general knowledge."""
    turns: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        question, answer = rng.choice(_KINDS)(rng)
        turns += [request_variant(rng, question), answer]
    return chat_document(rng, turns, f"I know this. {turns[-1]}")


def _question(rng: Random) -> _Pair:
    return rng.choice(QUESTIONS)


def _sound(rng: Random) -> _Pair:
    animal = rng.choice(list(ANIMAL_SOUNDS))
    one = with_article(animal)
    question = rng.choice([f"What sound does {one} make?", f"What does {one} say?"])
    return question, f"{capital(one)} says {ANIMAL_SOUNDS[animal]}."


def _baby(rng: Random) -> _Pair:
    animal = rng.choice(list(ANIMAL_BABIES))
    questions = [f"What is a baby {animal} called?", f"What do you call a baby {animal}?"]
    answer = f"A baby {animal} is called {with_article(ANIMAL_BABIES[animal])}."
    return rng.choice(questions), answer


def _legs(rng: Random) -> _Pair:
    animal = rng.choice(list(LEG_COUNTS))
    count = LEG_COUNTS[animal]
    answer = f"{with_article(animal)} has {number_words(count) if count else 'no'} legs."
    return f"How many legs does {with_article(animal)} have?", capital(answer)


def _month(rng: Random) -> _Pair:
    i = rng.randint(0, 11)
    month, following, previous = MONTHS[i], MONTHS[(i + 1) % 12], MONTHS[i - 1]
    leap = ", and 29 in a leap year." if month == "February" else "."
    return rng.choice(
        [
            (f"How many days does {month} have?", f"{month} has {MONTH_LENGTHS[i]} days{leap}"),
            (f"Which month comes after {month}?", f"{following} comes after {month}."),
            (f"Which month comes before {month}?", f"{previous} comes before {month}."),
        ]
    )


def _weekday(rng: Random) -> _Pair:
    i = rng.randint(0, 6)
    day, following, previous = WEEKDAYS[i], WEEKDAYS[(i + 1) % 7], WEEKDAYS[i - 1]
    return rng.choice(
        [
            (f"Which day comes after {day}?", f"{following} comes after {day}."),
            (f"Which day comes before {day}?", f"{previous} comes before {day}."),
        ]
    )


def _element(rng: Random) -> _Pair:
    name, symbol, number = rng.choice(ELEMENTS)
    return rng.choice(
        [
            (
                f"What is the chemical symbol for {name}?",
                f"The chemical symbol for {name} is {symbol}.",
            ),
            (
                f"Which element has the symbol {symbol}?",
                f"{symbol} is the symbol for {name}.",
            ),
            (
                f"What is the atomic number of {name}?",
                f"The atomic number of {name} is {number}.",
            ),
        ]
    )


def _color_mix(rng: Random) -> _Pair:
    a, b, mix = rng.choice(COLOR_MIXES)
    questions = [
        f"What color do you get when you mix {a} and {b}?",
        f"What do {a} and {b} make?",
    ]
    return rng.choice(questions), f"When you mix {a} and {b} you get {mix}."


def _home(rng: Random) -> _Pair:
    one = with_article(animal := rng.choice(list(ANIMAL_HOMES)))
    return f"Where does {one} live?", f"{capital(one)} lives in {ANIMAL_HOMES[animal]}."


_KINDS: tuple[Callable[[Random], _Pair], ...] = (
    *(_question,) * 8,
    _sound,
    _baby,
    _legs,
    _month,
    _weekday,
    _element,
    _color_mix,
    _home,
)


def geography(rng: Random, facts: Facts) -> str:
    """One to three questions about countries."""
    turns: list[str] = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        turns += _country_question(rng, rng.choice(facts.countries))
    return chat_document(rng, turns, f"I know this from geography. {turns[-1]}")


def _country_question(rng: Random, country: Country) -> _Pair:
    known = {
        "continent": country.continent,
        "currency": country.currency,
        "language": country.language,
    }
    topics = ["capital", "capital", "capital", *(topic for topic, fact in known.items() if fact)]
    topic = rng.choice(topics)
    name, city = country.name, country.capital
    capital_questions = [
        f"What is the capital of {name}?",
        f"Which city is the capital of {name}?",
        f"Tell me the capital of {name}.",
        f"capital of {name}",
    ]
    language_questions = [
        f"Which language do people speak in {name}?",
        f"What is the official language of {name}?",
    ]
    pairs = {
        "capital": (rng.choice(capital_questions), f"The capital of {name} is {city}."),
        "continent": (
            rng.choice([f"On which continent is {name}?", f"Where is {name}?"]),
            f"{capital(name)} is in {country.continent}.",
        ),
        "currency": (
            f"What is the currency of {name}?",
            f"The currency of {name} is the {country.currency}.",
        ),
        "language": (rng.choice(language_questions), f"People in {name} speak {country.language}."),
    }
    if topic == "capital" and rng.random() < 0.25:
        return f"{city} is the capital of which country?", f"{city} is the capital of {name}."
    return pairs[topic]


def word_meaning(rng: Random, facts: Facts) -> str:
    """One or two questions about the meaning or the use of a word."""
    turns: list[str] = []
    for _ in range(rng.choice([1, 1, 2])):
        meaning = rng.choice(facts.meanings)
        question, answer = _meaning_question(rng, meaning)
        turns += [request_variant(rng, question), answer]
    reasoning = "The user asks about a word. I give its part of speech and its meaning."
    if question.startswith("Use "):
        reasoning = "I write one sentence with the word."
    return chat_document(rng, turns, reasoning)


def _meaning_question(rng: Random, meaning: Meaning) -> _Pair:
    word, part = meaning.word, meaning.part_of_speech
    stem = re.compile(rf"\b{word[: max(4, len(word) - 2)]}")
    example = next((text for text in meaning.examples if stem.search(text)), None)
    question = rng.choice(
        [
            f'What does "{word}" mean?',
            f"What is the meaning of {word}?",
            f"Define {word}.",
            f"Explain the word {word}.",
            f"Use {word} in a sentence." if example else f'Define "{word}".',
        ]
    )
    full_stop = "" if example and example[-1] in ".?!" else "."
    if example and question.startswith("Use "):
        return question, capital(example) + full_stop
    answer = rng.choice(
        [
            f'"{capital(word)}" is {with_article(part)}. It means: {meaning.definition}.',
            f"{capital(word)} ({part}): {meaning.definition}.",
        ]
    )
    if example and rng.random() < 0.5:
        answer += f' For example: "{example}"{full_stop}'
    return question, answer


def explanation(rng: Random) -> str:
    """A short explanation, sometimes cut to one sentence."""
    topic, text = rng.choice(EXPLANATIONS)
    question = rng.choice(
        [
            f"Explain {topic}.",
            f"Explain {topic} in simple words.",
            f"Can you explain {topic}?",
            f"Tell me about {topic}.",
            f"Please explain {topic} to a child.",
            f"Write a short text about {topic}.",
            f"What can you tell me about {topic}?",
        ]
    )
    turns = [request_variant(rng, question), text]
    reasoning = (
        f"The user wants to know about {topic}. I will explain it in a few simple sentences."
    )
    if rng.random() < 0.25:
        shorter = ["Make it shorter.", "Can you say it in one sentence?", "Shorter, please."]
        turns += [rng.choice(shorter), first_sentence(text)]
        reasoning = "I keep only the most important sentence."
    return chat_document(rng, turns, reasoning)


def first_sentence(text: str) -> str:
    """Cut a text after its first sentence."""
    return text.split(". ")[0].rstrip(".") + "."


def instructions(rng: Random) -> str:
    """Steps to do something, sometimes with a question about one of them."""
    task, *steps = rng.choice(INSTRUCTIONS)
    question = rng.choice(
        [
            f"How do I {task}?",
            f"How can I {task}?",
            f"Explain how to {task}.",
            f"Give me steps to {task}.",
            f"What are the steps to {task}?",
            f"Tell me how to {task}.",
        ]
    )
    answer = _steps_answer(rng, task, steps)
    turns = [request_variant(rng, question), answer]
    if rng.random() < 0.3:
        i = rng.randrange(len(steps))
        turns += [
            rng.choice([f"What is step {i + 1}?", f"What is the {ordinal(i)} step?"]),
            steps[i],
        ]
    return chat_document(rng, turns, f"The user wants to {task}. I will give the steps in order.")


def _steps_answer(rng: Random, task: str, steps: list[str]) -> str:
    layout = rng.randint(0, 2)
    if layout == 0:
        leads = [f"Here is how to {task}:", "Follow these steps:", f"To {task}, do this:"]
        numbered = "\n".join(f"{i + 1}. {step}" for i, step in enumerate(steps))
        return f"{rng.choice(leads)}\n\n{numbered}"
    if layout == 1:
        first, second, *middle, last = steps
        parts = ["First,", uncapital(first), "Then", uncapital(second), " ".join(middle)]
        return " ".join([*parts, "Finally,", uncapital(last)])
    return "\n".join(f"- {step}" for step in steps)
