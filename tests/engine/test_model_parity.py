"""Logits and greedy tokens of every family against transformers in fp32 on the CPU.

The torch references run on the CPU, the Triton kernels (marker gpu) in fp32 on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from tests.engine.model_driver import TORCH_ON_CPU, DrivenRequest, ModelDriver, Setting
from tests.oracle.tiny_models import CASES_BY_FAMILY, all_logits, build_oracle, greedy_tokens
from tests.tolerances import LOGITS_FP32

PROMPT_LEN = 200
NUM_GREEDY = 64
EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
EMBEDDED_TEXT = (
    "Once upon a time there was a little girl named Lily. She had a red ball and a small dog. "
    "Every morning they went to the park, where the old man fed the birds. One day the ball "
    "rolled into the pond. Lily was sad, but the dog jumped into the water and brought it back. "
    "def add(a, b):\n    return a + b\n\nWhat is the capital of France? Paris. "
)


TRITON_ON_CUDA = Setting(torch.device("cuda"), is_triton=True)


@dataclass
class Subject:
    """A model of ours, the oracle with the same weights, and a prompt."""

    driver: ModelDriver
    oracle: PreTrainedModel
    prompt: list[int]


@pytest.fixture(scope="module", autouse=True)
def single_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(
    scope="module",
    params=[TORCH_ON_CPU, pytest.param(TRITON_ON_CUDA, marks=pytest.mark.gpu)],
    ids=["torch-cpu", "triton-cuda"],
)
def setting(request: pytest.FixtureRequest) -> Setting:
    chosen: Setting = request.param
    return chosen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((family, case), id=f"{family}-{case.name}")
        for family, cases in CASES_BY_FAMILY.items()
        for case in cases
    ]
    + ["embedded"],
)
def subject(
    request: pytest.FixtureRequest, setting: Setting, tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    if request.param == "embedded":
        oracle = Qwen3_5ForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
        tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
        prompt = (tokenizer.encode(EMBEDDED_TEXT).ids * 3)[:PROMPT_LEN]
        return Subject(ModelDriver(EMBEDDED, setting), oracle.eval(), prompt)
    family, case = request.param
    oracle = build_oracle(family, case)
    folder = tmp_path_factory.mktemp("tiny")
    # Several shards: the index is on the way of every case.
    oracle.save_pretrained(folder, max_shard_size="40KB")
    generator = torch.Generator().manual_seed(11)
    prompt = torch.randint(case.vocab, (PROMPT_LEN,), generator=generator).tolist()
    return Subject(ModelDriver(folder, setting), oracle, prompt)


def prefill_in_chunks(driver: ModelDriver, request: DrivenRequest, chunk: int) -> torch.Tensor:
    logits = []
    while request.num_done < len(request.token_ids):
        num_rows = min(chunk, len(request.token_ids) - request.num_done)
        logits += driver.prefill([(request, num_rows)])
    return torch.cat(logits)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("chunk", [PROMPT_LEN, 64, 7])
def test_prompt_logits(subject: Subject, chunk: int) -> None:
    """E1: a 200-token prompt in one piece and in chunks.

    Oracle: transformers over the whole prompt.
    """
    request = subject.driver.start(subject.prompt)
    logits = prefill_in_chunks(subject.driver, request, chunk)
    subject.driver.finish(request)
    assert largest_difference(logits, all_logits(subject.oracle, subject.prompt)) <= LOGITS_FP32


def test_greedy_tokens(subject: Subject) -> None:
    """E1: 64 greedy tokens after the prompt, and the logits they were chosen from.

    Oracle: transformers' generate, and its forward over prompt and output.
    """
    driver = subject.driver
    request = driver.start(subject.prompt)
    logits = [prefill_in_chunks(driver, request, 64)]
    for _ in range(NUM_GREEDY):
        request.token_ids.append(int(logits[-1][-1].argmax()))
        logits += driver.decode([request])
    driver.finish(request)
    assert request.token_ids[PROMPT_LEN:] == greedy_tokens(
        subject.oracle, subject.prompt, NUM_GREEDY
    )
    difference = largest_difference(
        torch.cat(logits), all_logits(subject.oracle, request.token_ids)
    )
    assert difference <= LOGITS_FP32


def test_batch_with_joins_and_leaves(subject: Subject) -> None:
    """E2: mixed lengths prefilled together, decoded together while others come and go.

    Oracle: transformers on each prompt alone; slots and pages are reused as they were left.
    """
    driver = subject.driver
    prompts = [subject.prompt[start:] for start in (0, 131, 195, 70, 198, 100)]
    # Steps at which each prompt joins and leaves; at most four are in at once.
    stays = [(0, 40), (0, 9), (0, 25), (5, 30), (12, 45), (27, 50)]
    running: dict[int, DrivenRequest] = {}
    finished: dict[int, DrivenRequest] = {}
    logits: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(prompts))}
    for step in range(51):
        for index in [index for index, (_, leave) in enumerate(stays) if leave == step]:
            finished[index] = running.pop(index)
            driver.finish(finished[index])
        joining = [index for index, (join, _) in enumerate(stays) if join == step]
        for index in joining:
            running[index] = driver.start(prompts[index])
        for index, rows in prefill_staggered(driver, {i: running[i] for i in joining}):
            logits[index].append(rows)
        for index, request in running.items():
            request.token_ids.append(int(logits[index][-1][-1].argmax()))
        if running:
            decoded = driver.decode(list(running.values()), num_padding=step % 3)
            for index, rows in zip(running, decoded, strict=True):
                logits[index].append(rows)
    for index, prompt in enumerate(prompts):
        tokens = finished[index].token_ids
        output = tokens[len(prompt) :]
        assert output == greedy_tokens(subject.oracle, prompt, len(output))
        expected = all_logits(subject.oracle, tokens)
        assert largest_difference(torch.cat(logits[index]), expected) <= LOGITS_FP32


def prefill_staggered(
    driver: ModelDriver, requests: dict[int, DrivenRequest]
) -> list[tuple[int, torch.Tensor]]:
    """Prompts in halves, so that fresh and continued ones meet in one forward.

    The first prompt's first half; its second half with the others' first; their second.
    """
    halves = {
        index: (len(request.token_ids) // 2, -(-len(request.token_ids) // 2))
        for index, request in requests.items()
    }
    first, others = list(requests)[:1], list(requests)[1:]
    logits = []
    for group in (
        [(index, 0) for index in first],
        [(index, 1) for index in first] + [(index, 0) for index in others],
        [(index, 1) for index in others],
    ):
        if group:
            spans = [(requests[index], halves[index][half]) for index, half in group]
            rows = driver.prefill(spans)
            logits += [(index, rows[i]) for i, (index, _) in enumerate(group)]
    return logits
