"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Read by Triton when a kernel is defined, so it is set before anything imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from engine import LLM
from tests.interpreter import replace_once_per_launch

EMBEDDED = Path(__file__).parent.parent / "server" / "embedded"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from a second thread, and lose much on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Interpreted kernels in two thirds of the time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            replace_once_per_launch(monkeypatch)
        yield


@pytest.fixture(scope="session")
def embedded_llm() -> Iterator[LLM]:
    """The embedded model, uncompiled, with little memory so that requests compete for it."""
    with LLM(
        str(EMBEDDED),
        compile="off",
        device="cpu",
        max_running_requests=8,
        max_kv_tokens=4096,
        max_prefill_tokens=64,
        page_size=16,
        seed=0,
    ) as llm:
        yield llm
