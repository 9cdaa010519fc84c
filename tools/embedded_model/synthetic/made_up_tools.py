"""Made-up functions: their names and arguments have to be copied, they cannot be learned."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tools.embedded_model.synthetic.language import capital, enumeration, with_article
from tools.embedded_model.synthetic.lexicon import (
    ANIMALS,
    CITIES,
    CLOTHES,
    COLORS,
    FRUITS,
    FUNCTION_NOUNS,
    FUNCTION_VERBS,
    FURNITURE,
    MONTHS,
    NAMES,
    WEEKDAYS,
    WORDS,
)
from tools.embedded_model.synthetic.tools import (
    Arguments,
    Request,
    Result,
    Tool,
    define_function,
)


def _one_of(*values: Any) -> Callable[[Random], Any]:  # noqa: ANN401
    return lambda rng: rng.choice(values)


def _between(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


_PARAMETERS: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "name": ("string", _one_of(*NAMES)),
    "city": ("string", _one_of(*CITIES)),
    "color": ("string", _one_of(*COLORS)),
    "count": ("integer", _between(1, 99)),
    "day": ("string", _one_of(*WEEKDAYS)),
    "month": ("string", _one_of(*MONTHS)),
    "size": ("string", _one_of("small", "medium", "large")),
    "price": ("integer", _between(1, 500)),
    "year": ("integer", _between(1950, 2030)),
    "id": ("integer", _between(1, 9999)),
    "title": ("string", lambda rng: " ".join(rng.sample(WORDS, 2))),
    "item": ("string", _one_of(*FRUITS, *FURNITURE, *CLOTHES)),
    "animal": ("string", _one_of(*ANIMALS)),
    "email": ("string", lambda rng: f"{rng.choice(NAMES).lower()}@example.com"),
    "urgent": ("boolean", _one_of(True, False)),
    "language": ("string", _one_of("English", "French", "German", "Spanish")),
    "path": ("string", lambda rng: "/".join(rng.sample(WORDS, 2)) + ".txt"),
    "limit": ("integer", _between(1, 100)),
    "topic": ("string", _one_of(*WORDS)),
    "key": ("string", _one_of(*WORDS)),
    "value": ("integer", _between(0, 999)),
}


def made_up_tool(rng: Random) -> Tool:
    """A function with a random name and one to three random parameters."""
    verb, noun = rng.choice(FUNCTION_VERBS), rng.choice(WORDS + FUNCTION_NOUNS)
    name = rng.choice([f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", verb + capital(noun)])
    num_parameters = rng.choice([1, 1, 2, 2, 3])
    parameters = rng.sample(list(_PARAMETERS), num_parameters)
    properties = {
        parameter: {
            "type": _PARAMETERS[parameter][0],
            "description": f"The {parameter}" + rng.choice(["", f" of the {noun}"]),
        }
        for parameter in parameters
    }
    description = rng.choice([f"{capital(verb)} a {noun}.", f"Use this to {verb} a {noun}."])

    def ask(rng: Random) -> Request:
        arguments = {parameter: _PARAMETERS[parameter][1](rng) for parameter in parameters}
        listed = enumeration(
            f"{parameter} {json.dumps(value) if isinstance(value, bool) else value}"
            for parameter, value in arguments.items()
        )
        requests = [
            f"{capital(verb)} the {noun} with {listed}.",
            f"Please {verb} {with_article(noun)} with {listed}.",
            f"Use {name} with {listed}.",
            f"Can you {verb} the {noun}? Use {listed}.",
        ]
        return requests, arguments

    return Tool(define_function(name, description, properties), ask, _status)


def _status(rng: Random, _arguments: Arguments) -> Result:
    status, record = rng.choice(["done", "ok", "success", "error"]), rng.randint(1, 999)
    output = json.dumps({"status": status, "id": record})
    if status == "error":
        return output, f"Something went wrong. The status is {status}."
    return output, f"It is done. The id is {record}."
