"""Small programs: Python and JavaScript functions, expressions, shell commands."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.embedded_model.synthetic.chat import (
    Exercise,
    chat_document,
    exercise_document,
    request_variant,
)
from tools.embedded_model.synthetic.language import capital
from tools.embedded_model.synthetic.lexicon import ANIMALS, FRUITS, read_table
from tools.embedded_model.synthetic.sql import sql_query

_FUNCTIONS = read_table("functions")
_SNIPPETS = read_table("snippets")


@dataclass(frozen=True)
class Function:
    """A Python function: `does` completes "a function that ..."."""

    name: str
    source: str
    does: str
    explanation: str


def random_function(rng: Random) -> Function:
    """A function of the collection, its parameters renamed at random."""
    entry = rng.choice(_FUNCTIONS["function"])
    parameters: list[str] = []
    for parameter in entry["parameters"]:
        names = [parameter]
        if rng.random() < 0.5:
            alternatives = _FUNCTIONS["alternatives"].get(parameter, names)
            names = [name for name in alternatives if name not in parameters]
        name = rng.choice(names)
        parameters.append(parameter if name in parameters else name)
    names_in_body = {"f": entry["name"], **dict(zip("abc", parameters, strict=False))}
    body = entry["body"].strip("\n").format_map(names_in_body)
    lines = [f"def {entry['name']}({', '.join(parameters)}):"]
    if rng.random() < 0.3:
        lines.append(f'    """{capital(entry["does"])}."""')
    lines += ["    " + line for line in body.split("\n")]
    return Function(entry["name"], "\n".join(lines), entry["does"], entry["explanation"])


def programming(rng: Random) -> str:
    """A question about a small program."""
    return rng.choice(_KINDS)(rng)


def _write_function(rng: Random) -> str:
    function = random_function(rng)
    does = function.does
    request = rng.choice(
        [
            f"Write a Python function that {does}.",
            f"Write a function in Python that {does}.",
            f"Can you write a Python function that {does}?",
            f"I need a Python function called {function.name} that {does}.",
            f"Python function that {does}",
            f"Write code that {does} in Python.",
            f"Please write `{function.name}`, a function that {does}.",
        ]
    )
    answer = f"```python\n{function.source}\n```"
    layout = rng.randint(0, 3)
    if layout == 0:
        leads = [
            "Here is the function:",
            f"Here is a Python function that {does}:",
            "Sure! Here it is:",
        ]
        answer = f"{rng.choice(leads)}\n\n{answer}"
    if layout <= 1:
        answer += "\n\n" + function.explanation
    turns = [request_variant(rng, request), answer]
    if rng.random() < 0.2:
        questions = ["How does it work?", "Explain the code.", "Can you explain it?"]
        turns += [rng.choice(questions), function.explanation]
    reasoning = f"The user needs a function that {does}. {function.explanation}"
    return chat_document(rng, turns, reasoning)


def _explain_function(rng: Random) -> str:
    function = random_function(rng)
    source = f"```python\n{function.source}\n```"
    question = rng.choice(
        [f"What does this function do?\n\n{source}", f"Explain this code:\n\n{source}"]
    )
    answer = f"The function `{function.name}` {function.does}. {function.explanation}"
    reasoning = f"I read the code. It {function.does}."
    return exercise_document(rng, Exercise(question, answer, reasoning))


def _evaluate(rng: Random) -> str:
    expression, value = _expression(rng)
    question = rng.choice(
        [
            f"What does this print?\n\n```python\nprint({expression})\n```",
            f"What is the output of `print({expression})`?",
            f"What is the value of `{expression}` in Python?",
        ]
    )
    answer = f"The value is `{value!r}`."
    if "print" in question:
        answer = rng.choice([f"It prints `{value!r}`.", f"`{value!r}`"])
    reasoning = f"I evaluate {expression} step by step. The result is {value!r}."
    return exercise_document(rng, Exercise(question, answer, reasoning))


def _expression(rng: Random) -> tuple[str, object]:
    """A Python expression and its value."""
    num_numbers = rng.randint(2, 5)
    xs = [rng.randint(0, 9) for _ in range(num_numbers)]
    word = rng.choice(FRUITS + ANIMALS)
    a, b = rng.randint(1, 20), rng.randint(1, 9)
    fruit, animal = rng.choice(FRUITS), rng.choice(ANIMALS)
    expressions: list[tuple[str, object]] = [
        (f"{a} + {b}", a + b),
        (f"{a} * {b}", a * b),
        (f"{a} // {b}", a // b),
        (f"{a} % {b}", a % b),
        (f"{b} ** 2", b**2),
        (f'len("{word}")', len(word)),
        (f'"{word}".upper()', word.upper()),
        (f'"{word}"[0]', word[0]),
        (f'"{word}"[-1]', word[-1]),
        (f'"{word}"[::-1]', word[::-1]),
        (f"sum({xs})", sum(xs)),
        (f"max({xs})", max(xs)),
        (f"min({xs})", min(xs)),
        (f"len({xs})", len(xs)),
        (f"sorted({xs})", sorted(xs)),
        (f"{xs}[0]", xs[0]),
        (f"{xs}[-1]", xs[-1]),
        (f"{xs}[1:]", xs[1:]),
        (f"{xs} + [{b}]", [*xs, b]),
        (f"[x * 2 for x in {xs}]", [x * 2 for x in xs]),
        (f"[x for x in {xs} if x > {b}]", [x for x in xs if x > b]),
        (f"list(range({b}))", list(range(b))),
        (f'"{word}" + "s"', word + "s"),
        (f'"{word}" * 2', word * 2),
        (f'"a" in "{word}"', "a" in word),
        (f"{a} > {b}", a > b),
        (f"{a} == {b}", a == b),
        (f'str({a}) + "{b}"', f"{a}{b}"),
        (f'"{word},{fruit}".split(",")', [word, fruit]),
        (f'"-".join(["{word}", "{animal}"])', f"{word}-{animal}"),
    ]
    return rng.choice(expressions)


def _write_javascript(rng: Random) -> str:
    entry = rng.choice(_SNIPPETS["javascript"])
    does = entry["does"]
    request = rng.choice(
        [
            f"Write a JavaScript function that {does}.",
            f"JavaScript function that {does}",
            f"How do I write a function in JavaScript that {does}?",
        ]
    )
    answer = f"```javascript\n{entry['code'].strip()}\n```"
    reasoning = f"The user wants JavaScript code that {does}."
    return chat_document(rng, [request_variant(rng, request), answer], reasoning)


def _shell_command(rng: Random) -> str:
    does, command = rng.choice(_SNIPPETS["shell"])
    names = {
        "x": rng.choice(["notes", "report", "data", "test", "main", "server", "backup"]),
        "y": rng.choice(["error", "todo", "result", "final", "copy"]),
        "n": rng.randint(2, 100),
        "p": rng.choice([8000, 8080, 3000]),
    }
    does, command = does.format_map(names), command.format_map(names)
    question = rng.choice(
        [
            f"How do I {does} in the terminal?",
            f"Which command can I use to {does}?",
            f"Linux command to {does}",
            f"Give me a shell command to {does}.",
        ]
    )
    answer = rng.choice(
        [
            f"```bash\n{command}\n```",
            f"Use this command:\n\n```bash\n{command}\n```",
            f"You can run `{command}`.",
        ]
    )
    exercise = Exercise(question, answer, "I know the right command for this.")
    return exercise_document(rng, exercise)


_KINDS: tuple[Callable[[Random], str], ...] = (
    *(_write_function, _write_function, _write_function, _write_function, _write_function),
    _explain_function,
    _evaluate,
    _write_javascript,
    _shell_command,
    sql_query,
)
