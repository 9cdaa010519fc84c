"""Sums, number puzzles and word problems with exact answers."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.embedded_model.synthetic.chat import (
    Exercise,
    chat_document,
    exercise_document,
    request_variant,
)
from tools.embedded_model.synthetic.language import capital, number_words
from tools.embedded_model.synthetic.lexicon import FRUITS, GIRLS, NAMES, UNITS


def arithmetic(rng: Random) -> str:
    """One exercise, sometimes with a second sum in the same chat."""
    kind = rng.randrange(len(_EXERCISES) + 1)
    if kind == len(_EXERCISES):
        return _word_problem(rng)
    exercise = _EXERCISES[kind](rng)
    if rng.random() < 0.25:
        a, b = rng.randint(0, 50), rng.randint(0, 50)
        first = request_variant(rng, exercise.question)
        turns = [first, exercise.answer, f"And {a} + {b}?", f"{a} + {b} = {a + b}"]
        return chat_document(rng, turns, _addition_steps(a, b))
    turns = [request_variant(rng, exercise.question), exercise.answer]
    return chat_document(rng, turns, exercise.reasoning)


def _operands(rng: Random) -> tuple[int, int]:
    largest = rng.choice([10, 20, 100, 100, 1000])
    return rng.randint(0, largest), rng.randint(0, largest)


def _addition(rng: Random) -> Exercise:
    a, b = _operands(rng)
    questions = [
        f"What is {a} + {b}?",
        f"Calculate {a} + {b}.",
        f"{a} + {b} = ?",
        f"How much is {a} plus {b}?",
        f"Add {a} and {b}.",
        f"What is {a} plus {b}?",
        f"{a}+{b}",
    ]
    answers = [
        f"{a} + {b} = {a + b}",
        f"{a} + {b} = {a + b}.",
        f"The answer is {a + b}.",
        f"{a} plus {b} is {a + b}.",
    ]
    return Exercise(rng.choice(questions), rng.choice(answers), _addition_steps(a, b))


def _addition_steps(a: int, b: int) -> str:
    if a < 10 or b < 10:
        return f"{a} + {b} is {a + b}."
    tens = b // 10 * 10
    return f"{a} + {b}: first I add {tens} and get {a + tens}, then I add {b % 10} and get {a + b}."


def _subtraction(rng: Random) -> Exercise:
    b, a = sorted(_operands(rng))
    questions = [
        f"What is {a} - {b}?",
        f"Calculate {a} - {b}.",
        f"{a} - {b} = ?",
        f"How much is {a} minus {b}?",
        f"Subtract {b} from {a}.",
    ]
    answers = [
        f"{a} - {b} = {a - b}",
        f"{a} - {b} = {a - b}.",
        f"The answer is {a - b}.",
        f"{a} minus {b} is {a - b}.",
    ]
    tens = b // 10 * 10
    reasoning = (
        f"{a} - {b}: I take away {tens} and get {a - tens}, "
        f"then I take away {b % 10} and get {a - b}."
    )
    return Exercise(rng.choice(questions), rng.choice(answers), reasoning)


def _multiplication(rng: Random) -> Exercise:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.2:
        a, b = rng.randint(10, 99), rng.randint(2, 9)
    questions = [
        f"What is {a} * {b}?",
        f"What is {a} times {b}?",
        f"Multiply {a} by {b}.",
        f"Calculate {a} x {b}.",
        f"{a} * {b} = ?",
        f"How much is {a} times {b}?",
    ]
    answers = [f"{a} * {b} = {a * b}", f"{a} times {b} is {a * b}.", f"The answer is {a * b}."]
    tens, ones = a // 10 * 10, a % 10
    reasoning = f"{a} times {b} is {a * b}."
    if a > 12:
        reasoning = (
            f"{a} times {b}: {tens} times {b} is {tens * b}, and {ones} times {b} is {ones * b}. "
            f"Together that is {a * b}."
        )
    return Exercise(rng.choice(questions), rng.choice(answers), reasoning)


def _division(rng: Random) -> Exercise:
    b, quotient = rng.randint(2, 12), rng.randint(1, 12)
    a = b * quotient
    questions = [
        f"What is {a} / {b}?",
        f"What is {a} divided by {b}?",
        f"Divide {a} by {b}.",
        f"{a} / {b} = ?",
    ]
    answers = [
        f"{a} / {b} = {quotient}",
        f"{a} divided by {b} is {quotient}.",
        f"The answer is {quotient}.",
    ]
    reasoning = f"{b} times {quotient} is {a}, so {a} divided by {b} is {quotient}."
    return Exercise(rng.choice(questions), rng.choice(answers), reasoning)


def _comparison(rng: Random) -> Exercise:
    a, b = rng.sample(range(1000), 2)
    if rng.random() < 0.5:
        questions = [f"Which number is larger, {a} or {b}?", f"Which is bigger: {a} or {b}?"]
        question, answer = rng.choice(questions), f"{max(a, b)} is larger than {min(a, b)}."
    else:
        question = f"Which number is smaller, {a} or {b}?"
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    return Exercise(question, answer, f"I compare {a} and {b}. {answer}")


def _parity(rng: Random) -> Exercise:
    a = rng.randint(0, 999)
    question = rng.choice([f"Is {a} even or odd?", f"Is the number {a} even or odd?"])
    parity = "even" if a % 2 == 0 else "odd"
    reasoning = f"The last digit of {a} is {a % 10}, so it is {parity}."
    return Exercise(question, f"{a} is {parity}.", reasoning)


def _sequence(rng: Random) -> Exercise:
    start, step, num_shown = rng.randint(0, 50), rng.randint(1, 12), rng.randint(4, 6)
    *shown, following = range(start, start + (num_shown + 1) * step, step)
    numbers = ", ".join(map(str, shown))
    question = rng.choice([f"What comes next: {numbers}?", f"Continue the sequence {numbers}."])
    reasoning = (
        f"Each number is {step} more than the one before. {shown[-1]} + {step} = {following}."
    )
    return Exercise(question, f"The next number is {following}.", reasoning)


def _number_words(rng: Random) -> Exercise:
    n = rng.randint(0, 9999 if rng.random() < 0.3 else 100)
    words = number_words(n)
    if rng.random() < 0.5:
        questions = [f"Write {n} in words.", f"How do you write the number {n} in words?"]
        return Exercise(rng.choice(questions), capital(words) + ".")
    questions = [f"Write {words} as a number.", f"Which number is {words}?"]
    return Exercise(rng.choice(questions), f"{n}")


def _conversion(rng: Random) -> Exercise:
    large, small, factor = rng.choice(UNITS)
    n = rng.randint(1, 20)
    questions = [f"How many {small} are in {n} {large}?", f"Convert {n} {large} to {small}."]
    question = rng.choice(questions)
    if n > 1:
        answer = f"{n} {large} are {n * factor} {small}."
    else:
        answer = f"1 {'foot' if large == 'feet' else large[:-1]} is {factor} {small}."
    reasoning = f"One of the {large} has {factor} {small}. {n} times {factor} is {n * factor}."
    return Exercise(question, answer, reasoning)


_EXERCISES: tuple[Callable[[Random], Exercise], ...] = (
    *(_addition, _addition, _addition),
    *(_subtraction, _subtraction),
    *(_multiplication, _multiplication),
    _division,
    _comparison,
    _parity,
    _sequence,
    _number_words,
    _conversion,
)


@dataclass(frozen=True)
class _Scene:
    """Two people and what they count."""

    name: str
    other: str
    thing: str

    @property
    def things(self) -> str:
        if self.thing.endswith("y"):
            return self.thing[:-1] + "ies"
        return self.thing + ("es" if self.thing.endswith(("ch", "s")) else "s")


def _word_problem(rng: Random) -> str:
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice((*FRUITS, "book", "pencil", "coin", "marble", "stamp", "card"))
    scene = _Scene(name, other, thing)
    a, b = rng.randint(2, 60), rng.randint(2, 40)
    problem = rng.choice(_WORD_PROBLEMS)(rng, scene, a, b)
    steps = problem.reasoning + " "
    answer = (steps if rng.random() < 0.4 else "") + problem.answer
    return exercise_document(rng, Exercise(problem.question, answer, steps + problem.answer))


def _receiving(_rng: Random, scene: _Scene, a: int, b: int) -> Exercise:
    her = "her" if scene.name in GIRLS else "him"
    question = (
        f"{scene.name} has {a} {scene.things}. {scene.other} gives {her} {b} more. "
        f"How many {scene.things} does {scene.name} have now?"
    )
    answer = f"{scene.name} has {a + b} {scene.things} now."
    return Exercise(question, answer, f"{a} + {b} = {a + b}.")


def _giving(_rng: Random, scene: _Scene, a: int, b: int) -> Exercise:
    a, b = max(a, b) + 1, min(a, b)
    she = "She" if scene.name in GIRLS else "He"
    question = (
        f"{scene.name} has {a} {scene.things}. {she} gives {b} of them to {scene.other}. "
        f"How many {scene.things} are left?"
    )
    answer = f"{scene.name} has {a - b} {scene.things} left."
    return Exercise(question, answer, f"{a} - {b} = {a - b}.")


def _boxes(rng: Random, scene: _Scene, _a: int, _b: int) -> Exercise:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    question = (
        f"There are {a} boxes with {b} {scene.things} in each box. "
        f"How many {scene.things} are there?"
    )
    return Exercise(question, f"There are {a * b} {scene.things}.", f"{a} * {b} = {a * b}.")


def _sharing(rng: Random, scene: _Scene, _a: int, _b: int) -> Exercise:
    a, b = rng.randint(2, 10), rng.randint(2, 12)
    question = (
        f"{scene.name} shares {a * b} {scene.things} equally among {a} friends. "
        "How many does each friend get?"
    )
    return Exercise(question, f"Each friend gets {b} {scene.things}.", f"{a * b} / {a} = {b}.")


def _prices(rng: Random, scene: _Scene, _a: int, _b: int) -> Exercise:
    count, price = rng.randint(2, 20), rng.randint(2, 9)
    question = f"A {scene.thing} costs {price} dollars. How much do {count} {scene.things} cost?"
    answer = f"{count} {scene.things} cost {count * price} dollars."
    return Exercise(question, answer, f"{count} * {price} = {count * price}.")


_WORD_PROBLEMS: tuple[Callable[[Random, _Scene, int, int], Exercise], ...] = (
    _receiving,
    _giving,
    _boxes,
    _sharing,
    _prices,
)
