"""E1, E2, E10: tokens through the scheduler equal transformers' greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import Qwen3_5ForCausalLM

from engine import LLM, SamplingParams
from engine.tokens import load_tokenizer
from tests.conftest import EMBEDDED
from tests.oracle.tiny_models import (
    DENSE_CASES,
    MOE_CASES,
    NEXT_CASES,
    TinyCase,
    build_oracle,
    greedy_tokens,
)

CASES = [
    ("qwen3_5_text", DENSE_CASES[0]),
    ("qwen3_5_moe", MOE_CASES[0]),
    ("qwen3_next", NEXT_CASES[1]),
]


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: str(value)[:24])
def test_mixed_lengths_with_joins_and_leaves(family: str, case: TinyCase, tmp_path: Path) -> None:
    """E1, E2: 9 requests, 3 at a time, tiny pages and chunks. Oracle: transformers, one by one.

    The KV cache holds about two of them, so some are preempted and computed again.
    """
    oracle = build_oracle(family, case)
    oracle.save_pretrained(tmp_path)
    rng = random.Random(case.name)
    lens = [40, 2, 6, 90, 7, 1, 8, 15, 40]
    counts = [64, 40, 3, 40, 1, 40, 17, 40, 40]
    prompts = [[rng.randrange(case.vocab) for _ in range(length)] for length in lens]
    with LLM(
        str(tmp_path),
        compile="off",
        device="cpu",
        max_running_requests=3,
        max_prefill_tokens=7,
        page_size=4,
        max_kv_tokens=136,
    ) as llm:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts
        ]
        outputs = llm.generate(prompts, params)
        assert llm.stats().num_preemptions_total > 0
        assert llm.stats().num_pages_used == llm.stats().num_slots_used == 0
    for prompt, count, output in zip(prompts, counts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(oracle, prompt, count)


def test_embedded_model_equals_transformers(embedded_llm: LLM) -> None:
    """E1: 64 greedy tokens of real prompts in one batch. Oracle: transformers, one by one."""
    oracle = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED, dtype="float32").eval()
    tokenizer = load_tokenizer(EMBEDDED)
    assert tokenizer is not None
    questions = [
        "What is 17 + 25?",
        "Who are you?",
        "Tell me a story about a fox named Leo and a bear who could not sleep. " * 6,
        "Sort these words alphabetically: tree, apple, moon",
    ]
    prompts = [
        tokenizer.encode(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n",
            parse_special=True,
            add_special_tokens=False,
        )
        for question in questions
    ]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = embedded_llm.generate(prompts, params)
    seen: set[int] = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy_tokens(oracle, prompt, 64)
        assert output.outputs[0].token_ids == expected
        seen.update(expected)
    assert len(seen) >= 50
