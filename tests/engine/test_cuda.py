"""E1 on CUDA, with the torch references: the same tokens as on the CPU."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from tests.conftest import EMBEDDED

pytestmark = pytest.mark.gpu


def test_fp32_tokens_equal_those_of_the_cpu(embedded_llm: LLM) -> None:
    """E1: a batch of prompts, greedy. Oracle: the CPU run."""
    prompts = [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for question in ("What is 17 + 25?", "Who are you?", "Tell me a story about a fox.")
    ]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    expected = embedded_llm.generate(prompts, params)
    with LLM(
        str(EMBEDDED),
        device="cuda",
        dtype="float32",
        compile="off",
        max_running_requests=4,
        max_kv_tokens=2048,
    ) as llm:
        outputs = llm.generate(prompts, params)
        seeded = SamplingParams(temperature=1.0, max_tokens=24, seed=5, top_p=0.9)
        on_cuda = llm.generate(prompts[2:], seeded)[0].outputs[0].token_ids
    on_cpu = embedded_llm.generate(prompts[2:], seeded)[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert on_cuda == on_cpu
