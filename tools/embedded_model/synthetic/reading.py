"""Documents about stories and short texts: telling, summing up, answering questions."""

from collections.abc import Callable
from random import Random

from tools.embedded_model.synthetic.chat import (
    Exercise,
    chat_document,
    exercise_document,
    request_variant,
)
from tools.embedded_model.synthetic.language import capital, uncapital, with_article
from tools.embedded_model.synthetic.lexicon import (
    BOYS,
    CITIES,
    COLORS,
    GIRLS,
    JOBS,
    NAMES,
    STORY_ANIMALS,
)
from tools.embedded_model.synthetic.stories import Story, tell_story

_STORY_REQUESTS = (
    "Tell me a story{about}.",
    "Write a short story{about}.",
    "Can you tell me a story{about}?",
    "I would like to hear a story{about}.",
    "Write a story for children{about}.",
    "Make up a short story{about}.",
    "Please write a little story{about}.",
    "Tell me a bedtime story{about}.",
)


def story_chat(rng: Random) -> str:
    """A story on request, sometimes with questions about it."""
    is_named = rng.random() < 0.5
    name = rng.choice(NAMES) if is_named else None
    kind = rng.choice((*STORY_ANIMALS, "girl", "boy")) if rng.random() < 0.5 else None
    if kind in ("girl", "boy"):
        name, is_named = rng.choice(GIRLS if kind == "girl" else BOYS), True
    story = tell_story(rng, name, kind)
    about = _about(rng, story, is_named, has_kind=kind is not None)
    text = story.text
    if rng.random() < 0.2:
        text = f"**{capital(story.theme)}**\n\n{text}"
    if rng.random() < 0.25:
        label = rng.choice(["Moral: ", "The lesson: ", "The moral of the story: "])
        text += "\n\n" + label + story.moral
    turns = [request_variant(rng, rng.choice(_STORY_REQUESTS).format(about=about)), text]
    turns += _reactions(rng, story)
    hero = story.hero
    if len(turns) == 2:
        reasoning = (
            f"The user wants a story{about}. I will write about {hero.name} the {hero.kind}, "
            "with a problem and a happy end."
        )
    else:
        reasoning = f"I look at the story again. {turns[-1]}"
    return chat_document(rng, turns, reasoning)


def _about(rng: Random, story: Story, is_named: bool, has_kind: bool) -> str:
    hero = story.hero
    kind = with_article(hero.kind)
    if has_kind and is_named:
        return rng.choice(
            [
                f" about {kind} named {hero.name}",
                f" about {hero.name} the {hero.kind}",
                f" about {kind} called {hero.name}",
            ]
        )
    if has_kind:
        return rng.choice(
            [
                f" about {kind}",
                f" about a {hero.trait} {hero.kind}",
                f" about {kind} and {story.theme}",
            ]
        )
    return f" about {story.theme}" if rng.random() < 0.6 else ""


def _reactions(rng: Random, story: Story) -> list[str]:
    x = rng.random()
    if x < 0.35:
        num_questions = min(len(story.questions), rng.randint(1, 3))
        return [turn for pair in rng.sample(story.questions, num_questions) for turn in pair]
    if x < 0.45:
        questions = [
            "What is the moral of the story?",
            "What can we learn from this story?",
            "What is the lesson?",
        ]
        return [rng.choice(questions), story.moral]
    if x < 0.5:
        thanks = ["Thank you, that was nice!", "I like this story.", "What a lovely story!"]
        replies = [
            "I am glad that you like it!",
            "Thank you! Would you like to hear another one?",
        ]
        return [rng.choice(thanks), rng.choice(replies)]
    return []


def summary(rng: Random) -> str:
    """A story to sum up."""
    story = tell_story(rng)
    hero = story.hero
    request = rng.choice(
        [
            "Summarize this story:\n\n{text}",
            "Write a short summary of this text:\n\n{text}",
            "What is this story about?\n\n{text}",
            "TL;DR:\n\n{text}",
        ]
    ).format(text=story.text)
    answer = (
        f"{capital(with_article(hero.trait))} {hero.kind} named {hero.name} learns a lesson about "
        f"{story.theme}. {story.moral}"
    )
    reasoning = f"The story is about {hero.name} and {story.theme}. The lesson is: {story.moral}"
    return exercise_document(rng, Exercise(request, answer, reasoning))


def reading(rng: Random) -> str:
    """A text and a question that it answers."""
    if rng.random() < 0.5:
        return _story_question(rng)
    names = rng.sample(NAMES, rng.randint(3, 6))
    sentences, question, answer = rng.choice(_STATEMENTS)(rng, names)
    rng.shuffle(sentences)
    text = " ".join(sentences) + " " + question
    return exercise_document(
        rng, Exercise(text, answer, f"I look for the right sentence. {answer}")
    )


def _story_question(rng: Random) -> str:
    story = tell_story(rng)
    question, answer = rng.choice(story.questions)
    lead = rng.choice(
        [
            "Read the story and answer the question.",
            "Answer the question about this text.",
            "Use the text to answer.",
        ]
    )
    statement = answer if answer.split()[0] in NAMES else uncapital(answer)
    reasoning = f"The question is: {question} The text says that {statement}"
    text = f"{lead}\n\n{story.text}\n\nQuestion: {question}"
    return exercise_document(rng, Exercise(text, answer, reasoning))


_Statements = tuple[list[str], str, str]


def _homes(rng: Random, names: list[str]) -> _Statements:
    cities = rng.sample(CITIES, len(names))
    i = rng.randrange(len(names))
    answer = f"{names[i]} lives in {cities[i]}."
    is_direct = rng.random() < 0.6
    question = f"Where does {names[i]} live?" if is_direct else f"Who lives in {cities[i]}?"
    sentences = [f"{name} lives in {city}." for name, city in zip(names, cities, strict=True)]
    return sentences, question, answer


def _jobs(rng: Random, names: list[str]) -> _Statements:
    jobs = rng.sample(JOBS, len(names))
    i = rng.randrange(len(names))
    sentences = [f"{name} is {with_article(job)}." for name, job in zip(names, jobs, strict=True)]
    if rng.random() < 0.6:
        return sentences, f"What is {names[i]}'s job?", f"{names[i]} is {with_article(jobs[i])}."
    return sentences, f"Who is the {jobs[i]}?", f"{names[i]} is the {jobs[i]}."


def _ages(rng: Random, names: list[str]) -> _Statements:
    ages = rng.sample(range(5, 80), len(names))
    i = rng.randrange(len(names))
    sentences = [f"{name} is {age} years old." for name, age in zip(names, ages, strict=True)]
    if rng.random() < 0.5:
        return sentences, f"How old is {names[i]}?", f"{names[i]} is {ages[i]} years old."
    if rng.random() < 0.5:
        age, name = max(zip(ages, names, strict=True))
        return sentences, "Who is the oldest?", f"{name} is the oldest, at {age} years."
    age, name = min(zip(ages, names, strict=True))
    return sentences, "Who is the youngest?", f"{name} is the youngest, at {age} years."


def _belongings(rng: Random, names: list[str]) -> _Statements:
    things = [
        rng.choice(COLORS) + " " + rng.choice(["ball", "car", "hat", "bag", "kite", "cup"])
        for _ in names
    ]
    i = rng.randrange(len(names))
    sentences = [f"{name} has {with_article(x)}." for name, x in zip(names, things, strict=True)]
    return sentences, f"What does {names[i]} have?", f"{names[i]} has {with_article(things[i])}."


_STATEMENTS: tuple[Callable[[Random, list[str]], _Statements], ...] = (
    _homes,
    _jobs,
    _ages,
    _belongings,
)
