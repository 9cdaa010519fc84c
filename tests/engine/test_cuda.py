"""E1, E2 on CUDA with the Triton kernels: the tokens of the CPU, and real geometries."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine import LLM, SamplingParams
from tests.conftest import EMBEDDED
from tests.engine.model_driver import ModelDriver, Setting
from tests.engine.test_model_parity import EMBEDDED_TEXT
from tests.tolerances import LOGPROB_BF16

pytestmark = pytest.mark.gpu
GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
PROMPT_LEN = 60
NUM_COMPARED = 200
MIN_DISTINCT_TOKENS = 50


@pytest.mark.parametrize("compile_blocks", ["off", "on"])
def test_fp32_tokens_equal_those_of_the_cpu(embedded_llm: LLM, compile_blocks: str) -> None:
    """E1: a batch of prompts, greedy, and one with a seed. Oracle: the CPU run."""
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
        compile=compile_blocks,
        max_running_requests=4,
        max_kv_tokens=2048,
    ) as llm:
        outputs = llm.generate(prompts, params)
        seeded = SamplingParams(temperature=1.0, max_tokens=24, seed=5, top_p=0.9)
        on_cuda = llm.generate(prompts[2:], seeded)[0].outputs[0].token_ids
    on_cpu = embedded_llm.generate(prompts[2:], seeded)[0].outputs[0].token_ids
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert on_cuda == on_cpu


def test_bf16_tokens_equal_those_of_the_cpu_up_to_near_ties() -> None:
    """E1: the embedded model in bf16, one token after another.

    Oracle: the torch references in bf16 on the CPU, whose tokens both are given. Where the
    likeliest tokens differ, the two likeliest of the oracle are closer than twice the largest
    difference of any logit.
    """
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    prompt = tokenizer.encode(EMBEDDED_TEXT).ids[:PROMPT_LEN]
    on_cpu = ModelDriver(EMBEDDED, Setting(dtype=torch.bfloat16))
    on_cuda = ModelDriver(
        EMBEDDED, Setting(torch.device("cuda"), is_triton=True, dtype=torch.bfloat16)
    )
    drivers = [on_cpu, on_cuda]
    requests = [driver.start(prompt) for driver in drivers]
    expected, got = (
        driver.prefill([(request, PROMPT_LEN)])[0][-1:].float()
        for driver, request in zip(drivers, requests, strict=True)
    )
    num_different = 0
    for _ in range(NUM_COMPARED):
        if int(expected.argmax()) != int(got.argmax()):
            num_different += 1
            best, second = expected[0].topk(2).values.tolist()
            assert best - second < 2 * float((expected - got).abs().max())
        # Not the likeliest alone: greedy text of a small model repeats itself.
        token = int(expected[0].topk(3).indices[requests[0].num_done % 3])
        for request in requests:
            request.token_ids.append(token)
        expected, got = (
            driver.decode([request])[0].float()
            for driver, request in zip(drivers, requests, strict=True)
        )
    assert num_different <= NUM_COMPARED // 20
    assert len(set(requests[0].token_ids)) >= MIN_DISTINCT_TOKENS


@pytest.mark.parametrize("geometry", ["Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B"])
def test_real_geometries_generate(geometry: str) -> None:
    """E1, E7: made-up weights, prompts of several lengths through prefill and decode.

    Oracle: the log-probabilities of the generated tokens when prompt and output are prefilled
    as one prompt: other kernels, the same weights. Not for the mixture of experts: the routers'
    made-up weights tie so often that rounding alone sends rows to other experts (its kernels are
    compared in fp32 in test_cuda_geometries.py); there every token must beat a blind guess.
    """
    generator = torch.Generator().manual_seed(0)
    lens = (1, 100, 700)
    prompts = [torch.randint(100_000, (n,), generator=generator).tolist() for n in lens]
    with LLM(
        str(GEOMETRIES / geometry),
        load_format="dummy",
        device="cuda",
        compile="off",  # a minute for each geometry; the kernels are the same
        max_running_requests=4,
        max_kv_tokens=8192,
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
        outputs = [output.outputs[0] for output in llm.generate(prompts, greedy)]
        longer = [p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
        scored = llm.generate(
            longer, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        )
    gc.collect()
    torch.cuda.empty_cache()
    assert len({tuple(output.token_ids) for output in outputs}) == len(lens)
    for num_prompt, output, score in zip(lens, outputs, scored, strict=True):
        assert output.finish_reason == "length" and len(output.token_ids) == 12
        assert output.logprobs is not None and score.prompt_logprobs is not None
        after_prompt = score.prompt_logprobs[num_prompt:]
        for generated, prefilled in zip(output.logprobs, after_prompt, strict=True):
            assert generated.logprob > -math.log(100_000)
            assert prefilled is not None and math.isfinite(prefilled.logprob)
            if "A3B" not in geometry:
                assert abs(generated.logprob - prefilled.logprob) < LOGPROB_BF16
