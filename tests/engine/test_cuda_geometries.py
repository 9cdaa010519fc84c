"""E1, E2, E7 on CUDA: the first layers of real geometries, fp32, against the torch references."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.loader import fill_dummy
from engine.model_config import load_model_config
from tests.engine.model_driver import ModelDriver, Setting
from tests.tolerances import LOGITS_FP32_WIDE

pytestmark = pytest.mark.gpu
GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
NUM_LAYERS = 4
PROMPT_LENS = (1, 70, 200)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def freed_memory() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    "geometry", ["Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B", "Qwen3-Next-80B-A3B"]
)
def test_first_layers_compute_what_the_references_do(geometry: str) -> None:
    """E2, E7: three GDN layers and one of attention, prefill in pieces, then decode.

    Oracle: the torch references on the same device, weights and tokens.
    """
    config = load_model_config(GEOMETRIES / geometry)
    config = replace(
        config,
        layer_kinds=config.layer_kinds[:NUM_LAYERS],
        is_moe=config.is_moe[:NUM_LAYERS],
        vocab_size=1024,
    )
    logits = []
    for is_triton in (False, True):
        driver = ModelDriver(config, Setting(CUDA, is_triton=is_triton))
        fill_dummy(driver.model.parameters(), seed=1)
        generator = torch.Generator().manual_seed(2)
        prompts = [
            torch.randint(config.vocab_size, (n + 3,), generator=generator).tolist()
            for n in PROMPT_LENS
        ]
        requests = [driver.start(prompt) for prompt in prompts]
        rows = driver.prefill([(requests[2], 100), (requests[0], 1)])
        rows += driver.prefill([(requests[2], 100), (requests[1], 70)])
        for _ in range(3):
            rows += driver.decode(requests, num_padding=1)
        # One row alone takes other kernels.
        requests[1].token_ids.append(5)
        rows += driver.decode(requests[1:2])
        logits.append(torch.cat(rows))
        del driver
    assert float(logits[0].std()) > 0.1
    assert float((logits[1] - logits[0]).abs().max()) <= LOGITS_FP32_WIDE
