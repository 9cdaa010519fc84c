"""V18: n-gram drafts on the embedded model, whose output repeats its input where it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from tests.spec.verify_contract import compare, greedy_run

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
NUM_TOKENS = 16
MAX_NEAR_TIES = 1 / 1000
ASKED = (
    "What is {0} + {1}?",
    "Tell me a short story about a {2}.",
    "Hello! My name is {3}. How are you?",
    "Is {0} more than {1}?",
    "What do you know about a {2} named {3}?",
)
ANIMALS = ("fox", "goose", "cat", "bear", "frog")
NAMES = ("Anna", "Ben", "Clara", "Dan", "Eve")


def start(**options: object) -> LLM:
    settings: dict[str, object] = {
        "device": "cpu",
        "compile": "off",
        "max_running_requests": 16,
        "max_kv_tokens": 8192,
    }
    return LLM(str(EMBEDDED), **(settings | options))  # type: ignore[arg-type]


def chat_prompts(llm: LLM, num_prompts: int) -> list[list[int]]:
    """Token ids of chats with one question each."""
    assert llm.tokenizer is not None
    prompts = []
    for index in range(num_prompts):
        question = ASKED[index % len(ASKED)].format(
            11 + index, 3 * index + 2, ANIMALS[index % 5], NAMES[index // 5 % 5]
        )
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(llm.tokenizer.encode(text, parse_special=True, add_special_tokens=False))
    return prompts


def test_ngram_equals_greedy_over_chats() -> None:
    """V18: 50 chat prompts. Oracle: the greedy run without drafts."""
    with start() as llm:
        prompts = chat_prompts(llm, 50)
        greedy = greedy_run(llm, prompts, NUM_TOKENS)
    with start(speculative_algorithm="ngram") as llm:
        result = compare(llm, prompts, greedy)
        assert llm.stats().num_accepted_tokens_total > 0
    assert result.num_tokens == 50 * NUM_TOKENS
    assert result.num_near_ties <= MAX_NEAR_TIES * result.num_tokens


@pytest.mark.parametrize("num_drafts", [3, 7])
def test_ngram_takes_fewer_steps_to_copy(num_drafts: int) -> None:
    """V18: a text that the output goes on repeating. Oracle: the greedy run, and its steps."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompt = "0 1 0 1 0 1 0 1 0 1 0 1 0 1"
    with start(max_running_requests=1) as llm:
        before = llm.stats().num_steps_total
        plain = llm.generate(prompt, params)[0].outputs[0].token_ids
        num_plain = llm.stats().num_steps_total - before
    with start(
        max_running_requests=1, speculative_algorithm="ngram", speculative_num_steps=num_drafts
    ) as llm:
        before = llm.stats().num_steps_total
        copied = llm.generate(prompt, params)[0].outputs[0].token_ids
        num_steps = llm.stats().num_steps_total - before
    assert copied == plain
    assert num_plain == len(plain)
    assert num_steps <= num_plain / 2


def test_a_longer_shortest_match_drafts_less() -> None:
    """V18, issue 5: the bounds reach the method. Oracle: no match of 24 tokens in 20 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    counts = []
    for bounds in (
        {},
        {
            "speculative_ngram_min_match_window_size": 24,
            "speculative_ngram_max_match_window_size": 32,
        },
    ):
        with start(max_running_requests=1, speculative_algorithm="ngram", **bounds) as llm:
            output = llm.generate("0 1 0 1 0 1", params)[0]
            assert len(output.prompt_token_ids) + 6 <= 20
            counts.append(llm.stats().num_draft_tokens_total)
    assert counts[0] > 0 == counts[1]
