"""E1, E2: whole tiny models on the Triton kernels, interpreted on the CPU or run on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.model_driver import ModelDriver, Setting
from tests.oracle.tiny_models import CASES_BY_FAMILY, build_oracle
from tests.tolerances import LOGITS_FP32

PROMPT_LENS = (3, 9)
NUM_STEPS = 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_triton_kernels_compute_what_the_references_do(
    family: str, device: str, tmp_path: Path
) -> None:
    """E2: prefill of two prompts in two pieces, then decode beside a padding row.

    Oracle: the same model on the torch references (which agree with transformers).
    """
    build_oracle(family, CASES_BY_FAMILY[family][0]).save_pretrained(tmp_path)
    logits = []
    for setting in (Setting(), Setting(torch.device(device), is_triton=True)):
        driver = ModelDriver(tmp_path, setting)
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(97, (n + NUM_STEPS,), generator=generator) for n in PROMPT_LENS]
        requests = [driver.start(prompt.tolist()) for prompt in prompts]
        rows = driver.prefill([(requests[0], 1), (requests[1], 7)])
        rows += driver.prefill([(requests[0], 2), (requests[1], 2)])
        for _ in range(NUM_STEPS):
            rows += driver.decode(requests, num_padding=1)
        logits.append(torch.cat(rows))
    assert float((logits[1] - logits[0]).abs().max()) <= LOGITS_FP32
