"""E5 on CPU: blocks compile whole, once per planned shape, and compute what eager does."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from engine import LLM, SamplingParams
from engine.model_config import load_model_config
from engine.models.hybrid import forward_block, forward_group
from tests.oracle.tiny_models import MOE_CASES, build_oracle, greedy_tokens

# Decode of two, decode of more, prefill. Decode of one is a group of blocks, of any width.
NUM_SHAPES_OF_BLOCKS = 3


def test_compiled_tokens_equal_the_oracle_without_recompiling(tmp_path: Path) -> None:
    """E5, E1: batches of 1 to 5, several chunks. Oracle: transformers; Dynamo's own counter."""
    case = MOE_CASES[0]
    oracle = build_oracle("qwen3_5_moe", case)
    oracle.save_pretrained(tmp_path)
    rng = random.Random(0)
    prompts = [[rng.randrange(case.vocab) for _ in range(n)] for n in (1, 3, 30, 70, 100)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    config = load_model_config(tmp_path)
    block_kinds = set(zip(config.layer_kinds, config.is_moe, strict=True))
    torch._dynamo.reset()
    with LLM(
        str(tmp_path), device="cpu", max_running_requests=5, max_prefill_tokens=48, page_size=8
    ) as llm:
        num_graphs = counters["stats"]["unique_graphs"]
        assert num_graphs > 0, "nothing was compiled"
        num_compilations = len(_debug_get_cache_entry_list(forward_block.__code__))
        assert num_compilations == NUM_SHAPES_OF_BLOCKS * len(block_kinds)
        assert len(_debug_get_cache_entry_list(forward_group.__code__)) == 1
        outputs = [llm.generate(prompts[2], params)[0], *llm.generate(prompts, params)]
        sampled = SamplingParams(temperature=1.0, max_tokens=4, top_p=0.9, ignore_eos=True)
        for size in (1, 2, 5):
            llm.generate(prompts[:size], sampled)
        assert counters["stats"]["unique_graphs"] == num_graphs, "a request met a compilation"
    for prompt, output in zip([prompts[2], *prompts], outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(oracle, prompt, 24)
