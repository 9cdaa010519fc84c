"""Functions that an assistant can call, with requests for them and their results."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.embedded_model.synthetic.knowledge import first_sentence
from tools.embedded_model.synthetic.language import capital, fill, with_article
from tools.embedded_model.synthetic.lexicon import (
    CITIES,
    CLOTHES,
    EXPLANATIONS,
    FRUITS,
    FURNITURE,
    INSTRUMENTS,
    NAMES,
    TRANSLATIONS,
    WEEKDAYS,
)
from tools.embedded_model.synthetic.rewriting import sentence

Arguments = dict[str, Any]
Request = tuple[list[str], Arguments]
Result = tuple[str, str]


@dataclass(frozen=True)
class Tool:
    """A function of an assistant.

    `ask` draws the arguments of a call and words the request of a user in several ways;
    `result` draws the output of the call and the sentence that reports it to the user.
    """

    definition: Mapping[str, Any]
    ask: Callable[[Random], Request]
    result: Callable[[Random, Arguments], Result]

    @property
    def name(self) -> str:
        """The name under which the function is called."""
        name: str = self.definition["function"]["name"]
        return name


def define_function(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Build the definition of a function whose parameters are all required."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


def _string(description: str) -> dict[str, str]:
    return {"type": "string", "description": description}


def _integer(description: str) -> dict[str, str]:
    return {"type": "integer", "description": description}


def _asking(draw: Callable[[Random], Arguments], *templates: str) -> Callable[[Random], Request]:
    def ask(rng: Random) -> Request:
        arguments = draw(rng)
        return [fill(template, arguments) for template in templates], arguments

    return ask


def _random_city(rng: Random) -> Arguments:
    return {"city": rng.choice(CITIES)}


def _weather(rng: Random, arguments: Arguments) -> Result:
    city, temperature = arguments["city"], rng.randint(-5, 35)
    condition = rng.choice(["sunny", "rainy", "cloudy", "windy", "snowy"])
    output = {"city": city, "temperature": temperature, "condition": condition}
    report = f"The weather in {city} is {condition}, with {temperature} degrees."
    return json.dumps(output), report


def _time(rng: Random, arguments: Arguments) -> Result:
    time = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return json.dumps({"time": time}), f"It is {time} in {arguments['city']}."


def _random_sum(rng: Random) -> Arguments:
    a, operator, b = rng.randint(10, 999), rng.choice("+-*"), rng.randint(10, 999)
    return {"expression": f"{a} {operator} {b}"}


def _calculate(_rng: Random, arguments: Arguments) -> Result:
    a, operator, b = arguments["expression"].split()
    x, y = int(a), int(b)
    value = {"+": x + y, "-": x - y, "*": x * y}[operator]
    return json.dumps({"result": value}), f"The result of {arguments['expression']} is {value}."


def _random_email(rng: Random) -> Arguments:
    return {
        "to": f"{rng.choice(NAMES).lower()}@example.com",
        "subject": rng.choice(["Hello", "Meeting", "Question", "Thanks", "Dinner"]),
        "body": sentence(rng),
    }


def _look_up(_rng: Random, arguments: Arguments) -> Result:
    text = dict(EXPLANATIONS)[arguments["query"]]
    return text, first_sentence(text)


def _random_light(rng: Random) -> Arguments:
    rooms = ["kitchen", "bedroom", "bathroom", "living room", "office", "garage"]
    return {"room": rng.choice(rooms), "state": rng.choice(["on", "off"])}


def _random_translation(rng: Random) -> Arguments:
    languages = ["French", "German", "Spanish", "Italian"]
    return {"text": rng.choice(list(TRANSLATIONS)), "language": rng.choice(languages)}


def _translate(_rng: Random, arguments: Arguments) -> Result:
    language = arguments["language"]
    translation = TRANSLATIONS[arguments["text"]][language]
    return json.dumps({"translation": translation}), f'In {language} it is "{translation}".'


def _random_event(rng: Random) -> Arguments:
    return {
        "title": rng.choice(["lunch", "a meeting", "the dentist", "a call", "tennis"]),
        "day": rng.choice(WEEKDAYS),
        "hour": rng.randint(8, 20),
    }


def _random_file(rng: Random) -> Arguments:
    name = rng.choice(["notes", "todo", "readme", "report", "data"])
    return {"path": name + rng.choice([".txt", ".md", ".csv"])}


def _read_file(rng: Random, arguments: Arguments) -> Result:
    text = sentence(rng)
    return text, f"The file {arguments['path']} says: {text}"


def _price(rng: Random, arguments: Arguments) -> Result:
    product, price = arguments["product"], rng.randint(1, 300)
    report = f"{capital(with_article(product))} costs {price} dollars."
    return json.dumps({"product": product, "price": price}), report


def _ask_row_count(rng: Random) -> Request:
    table = rng.choice(["users", "orders", "books", "students"])
    requests = [f"How many rows does the table {table} have?", f"Count the rows of {table}."]
    return requests, {"query": f"SELECT COUNT(*) FROM {table};"}


def _count_rows(rng: Random, _arguments: Arguments) -> Result:
    count = rng.randint(1, 5000)
    return json.dumps([[count]]), f"The table has {count} rows."


def _constant(output: Mapping[str, Any], report: str) -> Callable[[Random, Arguments], Result]:
    return lambda _rng, arguments: (json.dumps(output), fill(report, arguments))


TOOLS = (
    Tool(
        define_function(
            "get_weather",
            "Get the current weather for a city.",
            {"city": _string("The name of the city")},
        ),
        _asking(
            _random_city,
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Is it raining in {city}?",
            "Tell me the weather for {city}.",
        ),
        _weather,
    ),
    Tool(
        define_function(
            "get_time", "Get the current time in a city.", {"city": _string("The city")}
        ),
        _asking(_random_city, "What time is it in {city}?", "Tell me the time in {city}."),
        _time,
    ),
    Tool(
        define_function(
            "calculator",
            "Evaluate an arithmetic expression.",
            {"expression": _string("The expression to evaluate")},
        ),
        _asking(
            _random_sum,
            "What is {expression}?",
            "Calculate {expression}.",
            "Use the calculator for {expression}.",
        ),
        _calculate,
    ),
    Tool(
        define_function(
            "send_email",
            "Send an email.",
            {
                "to": _string("The receiver"),
                "subject": _string("The subject"),
                "body": _string("The text"),
            },
        ),
        _asking(
            _random_email,
            'Send an email to {to} with the subject "{subject}" and the text "{body}".',
        ),
        _constant({"status": "sent"}, "I sent the email to {to}."),
    ),
    Tool(
        define_function("set_timer", "Set a timer.", {"minutes": _integer("Number of minutes")}),
        _asking(
            lambda rng: {"minutes": rng.randint(2, 90)},
            "Set a timer for {minutes} minutes.",
            "Please start a timer of {minutes} minutes.",
            "Wake me in {minutes} minutes.",
        ),
        _constant({"status": "ok"}, "The timer is set for {minutes} minutes."),
    ),
    Tool(
        define_function("search", "Search the web.", {"query": _string("The search words")}),
        _asking(
            lambda rng: {"query": rng.choice(EXPLANATIONS)[0]},
            "Search the web for {query}.",
            "Look up {query}.",
            "Find information about {query}.",
        ),
        _look_up,
    ),
    Tool(
        define_function(
            "turn_on_light",
            "Turn a light on or off.",
            {"room": _string("The room"), "state": {"type": "string", "enum": ["on", "off"]}},
        ),
        _asking(
            _random_light,
            "Turn {state} the light in the {room}.",
            "Switch the {room} light {state}.",
        ),
        _constant({"ok": True}, "The light in the {room} is now {state}."),
    ),
    Tool(
        define_function(
            "translate",
            "Translate a text.",
            {"text": _string("The text"), "language": _string("The target language")},
        ),
        _asking(
            _random_translation,
            'Translate "{text}" to {language}.',
            'How do you say "{text}" in {language}?',
        ),
        _translate,
    ),
    Tool(
        define_function(
            "add_event",
            "Add an event to the calendar.",
            {
                "title": _string("The title"),
                "day": _string("The day"),
                "hour": _integer("The hour"),
            },
        ),
        _asking(
            _random_event,
            "Add {title} to my calendar on {day} at {hour}.",
            "Put {title} into the calendar for {day}, {hour} o'clock.",
        ),
        _constant({"status": "added"}, "I added {title} on {day} at {hour}."),
    ),
    Tool(
        define_function("read_file", "Read a file.", {"path": _string("The path of the file")}),
        _asking(_random_file, "Read the file {path}.", "What is in {path}?", "Show me {path}."),
        _read_file,
    ),
    Tool(
        define_function(
            "get_price", "Get the price of a product.", {"product": _string("The product")}
        ),
        _asking(
            lambda rng: {"product": rng.choice(CLOTHES + FURNITURE + FRUITS)},
            "How much is {product:a}?",
            "What is the price of {product:a}?",
            "What does {product:a} cost?",
        ),
        _price,
    ),
    Tool(
        define_function("run_sql", "Run an SQL query.", {"query": _string("The SQL query")}),
        _ask_row_count,
        _count_rows,
    ),
    Tool(
        define_function(
            "play_music",
            "Play music.",
            {
                "instrument": _string("The instrument"),
                "volume": _integer("The volume from 0 to 10"),
            },
        ),
        _asking(
            lambda rng: {"instrument": rng.choice(INSTRUMENTS), "volume": rng.randint(1, 10)},
            "Play some {instrument} music at volume {volume}.",
            "I want to hear the {instrument}, volume {volume}.",
        ),
        _constant({"status": "playing"}, "I am playing {instrument} music at volume {volume}."),
    ),
)
