"""The synthetic documents and prompts of the embedded model."""

import ast
import hashlib
import json
import operator
import random
import re
from itertools import islice

import pytest

from tools.embedded_model.facts import Facts, read_facts
from tools.embedded_model.prompts import fresh_prompts
from tools.embedded_model.render import render
from tools.embedded_model.synthetic.arithmetic import arithmetic
from tools.embedded_model.synthetic.code import programming, random_function
from tools.embedded_model.synthetic.documents import synthetic_documents
from tools.embedded_model.synthetic.language import number_words
from tools.embedded_model.synthetic.words import word_exercise


@pytest.fixture(scope="module")
def facts() -> Facts:
    return read_facts()


@pytest.mark.parametrize(
    ("seed", "digest"),
    [
        (0, "e1651d927c91bea9f673eac820215e05d70520488503a410710626b4034a59df"),
        (1000, "87d1ab3dee47bd6f34322ed517e7c707eddecb667df4bf47b33db9dde5bc3674"),
        (1007, "bc37c37191fb355b9d186efb128f1e7bc1f265cf0e375bf1a6a0451ea961d9bb"),
    ],
)
def test_documents_of_a_seed_never_change(seed: int, digest: str, facts: Facts) -> None:
    """S1. Oracle: digests of the documents that the published model was trained on."""
    documents = islice(synthetic_documents(seed, facts), 1000)
    assert hashlib.sha256("\0".join(documents).encode()).hexdigest() == digest


_OPERATORS = {
    "+": operator.add,
    "plus": operator.add,
    "-": operator.sub,
    "minus": operator.sub,
    "*": operator.mul,
    "times": operator.mul,
    "/": operator.floordiv,
    "divided by": operator.floordiv,
}
_SUM = re.compile(r"(\d+) (\+|-|\*|/|plus|minus|times|divided by) (\d+) (?:=|is) (\d+)(?! \d|\d)")


def test_every_sum_is_right() -> None:
    """S1. Oracle: Python's arithmetic on every "a op b = c" of questions, steps and answers."""
    rng = random.Random(4)
    sums = [found for _ in range(3000) for found in _SUM.findall(arithmetic(rng))]
    assert len(sums) > 2000
    for a, sign, b, result in sums:
        assert _OPERATORS[sign](int(a), int(b)) == int(result), (a, sign, b, result)


def test_bare_answers_fit_their_question() -> None:
    """S1. Oracle: Python's arithmetic on the question before "The answer is N."."""
    rng = random.Random(5)
    pattern = re.compile(
        r"(\d+) (\+|-|\*|/|plus|minus|times|divided by) (\d+)\D*<\|im_end\|>\n"
        r"<\|im_start\|>assistant\n(?:<think>.*?</think>\n\n)?The answer is (\d+)\.",
        re.DOTALL,
    )
    answers = [found for _ in range(3000) for found in pattern.findall(arithmetic(rng))]
    assert len(answers) > 200
    for a, sign, b, result in answers:
        assert _OPERATORS[sign](int(a), int(b)) == int(result), (a, sign, b, result)


def test_numbers_in_words() -> None:
    """S1. Oracle: the words, written by hand."""
    assert [number_words(n) for n in (0, 13, 20, 42, 100, 305, 7019)] == [
        "zero",
        "thirteen",
        "twenty",
        "forty-two",
        "one hundred",
        "three hundred and five",
        "seven thousand nineteen",
    ]


def test_sorted_lists_are_sorted() -> None:
    """S1. Oracle: Python's sort."""
    rng = random.Random(6)
    num_checked = 0
    for _ in range(2000):
        chat = word_exercise(rng)
        listed = re.search(r"ort ([\d, ]+\d) from smallest to largest", chat)
        if listed is None:
            continue
        answer = chat.rsplit("\n", 2)[-2].removesuffix("<|im_end|>")
        numbers = sorted(int(number) for number in listed[1].split(", "))
        assert answer == ", ".join(map(str, numbers))
        num_checked += 1
    assert num_checked > 10


def test_printed_values_are_right() -> None:
    """S1. Oracle: Python's own evaluation of the expression."""
    rng = random.Random(7)
    num_checked = 0
    for _ in range(3000):
        chat = programming(rng)
        found = re.search(
            r"value of `(.*)` in Python.*\n(?:<\|.*\n(?:<think>(?:.|\n)*?</think>\n\n)?)"
            r"The value is `(.*)`\.",
            chat,
        )
        if found:
            assert repr(eval(found[1])) == found[2]
            num_checked += 1
    assert num_checked > 50


def test_functions_are_valid_python() -> None:
    """S1. Oracle: Python's parser; the parameters of a function are distinct."""
    rng = random.Random(8)
    for _ in range(1500):
        function = random_function(rng)
        (node,) = ast.parse(function.source).body
        assert isinstance(node, ast.FunctionDef)
        assert node.name == function.name
        names = [argument.arg for argument in node.args.args]
        assert len(set(names)) == len(names)


def test_chats_render_in_the_trained_layout() -> None:
    """S1. Oracle: the layout, written by hand."""
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    text = render(
        [
            {"role": "system", "content": " Be short. "},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!", "reasoning": "dropped"},
            {"role": "user", "content": "Time?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning": "I call.",
                "calls": [("get_time", {"city": "Oslo", "days": [1]}), ("get_time", {})],
            },
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "Late."},
        ],
        [tool],
    )
    head, _, rest = text.partition("</IMPORTANT>")
    assert head.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>\n\nIf you choose" in head
    assert rest == (
        "\n\nBe short.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nTime?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nI call.\n</think>\n\n"
        "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n[1]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nLate.<|im_end|>\n"
    )


def test_fresh_prompts_end_where_the_answer_is_due() -> None:
    """S1. Oracle: the two generation prompts of the chat layout."""
    prompts = fresh_prompts(3, 200)
    assert len(prompts) == 200
    assert fresh_prompts(3, 5) == prompts[:5]
    assert fresh_prompts(4, 5) != prompts[:5]
    header = "<|im_start|>assistant\n<think>\n"
    with_reasoning = [prompt for prompt in prompts if prompt.endswith(header)]
    without = [prompt for prompt in prompts if prompt.endswith(header + "\n</think>\n\n")]
    assert len(with_reasoning) + len(without) == 200
    assert min(len(with_reasoning), len(without)) > 50
    for prompt in prompts:
        assert prompt.count("<|im_start|>") == prompt.count("<|im_end|>") + 1
