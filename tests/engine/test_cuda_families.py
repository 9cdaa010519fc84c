"""E5 on CUDA: captured steps against the same calls uncaptured, and what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.cache.pools import CachePools
from engine.config import EngineConfig
from engine.device_facts import read_device_facts
from engine.model_config import load_model_config
from engine.models.hybrid import HybridModel
from engine.plan import make_plan
from engine.start import allocate, count_weights, load_model
from engine.step_set import StepSet, build_steps, prepare_thread
from engine.token_step import SAMPLED, TokenStep
from graphs.family import GraphFamily
from graphs.inputs import Kind
from graphs.rows import Row
from tests.oracle.tiny_models import CASES_BY_FAMILY, build_oracle

pytestmark = pytest.mark.gpu
FAMILIES = ["qwen3_5_text", "qwen3_5_moe"]
CONTEXT = 20
PAGE_SIZE = 16


@dataclass(frozen=True)
class Rig:
    """A tiny model on CUDA with its steps compiled, and a family of logits captured."""

    model: HybridModel
    pools: CachePools
    steps: StepSet
    step: TokenStep
    logits: GraphFamily[None, Tensor]

    def rows(self, num_requests: int) -> list[Row]:
        """The row at CONTEXT of requests in slots 1, 2, ..., each with two pages."""
        return [
            Row(slot=1 + i, position=CONTEXT, page=2 + 2 * i, output_index=3, token_id=7 + i)
            for i in range(num_requests)
        ]

    def state(self) -> list[Tensor]:
        """What a step may change."""
        return [*self.pools.tensors(), *self.steps.tables.tensors(), *self.steps.sampling.tensors()]


@pytest.fixture(params=FAMILIES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    build_oracle(request.param, CASES_BY_FAMILY[request.param][0]).save_pretrained(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path),
        device="cuda",
        dtype="float32",
        max_running_requests=8,
        max_kv_tokens=1024,
        page_size=PAGE_SIZE,
    )
    model_config = load_model_config(tmp_path)
    plan = make_plan(config, model_config, read_device_facts("cuda"), count_weights(model_config))
    pools = allocate(plan)
    for pool in pools.tensors():
        pool.normal_()
    model = load_model(plan, pools, has_progress=False)
    prepare_thread(plan)
    steps = build_steps(plan, model, pools)
    steps.decode.capture()
    step = TokenStep(model, steps.functions, steps.tables, steps.sampling, PAGE_SIZE, ())
    device = plan.device.device
    for slot in range(1, 9):
        pages = torch.tensor([[2 * slot - 1, 2 * slot]], device=device)
        steps.tables.set_pages(torch.tensor([slot], device=device), pages)
    logits: GraphFamily[None, Tensor] = GraphFamily(
        Kind.DECODE,
        1,
        steps.decode.sizes,
        [None],
        lambda rows, _: step.forward(rows)[0],
        device=device,
        pool=torch.cuda.graph_pool_handle(),
    )
    logits.capture()
    return Rig(model, pools, steps, step, logits)


def test_captured_logits_are_those_of_the_compiled_calls(rig: Rig) -> None:
    """E5: batch 1, 3 in a graph of 4, and 8, one after another, in turns on and off.

    Oracle: the same compiled calls at the same padded size, uncaptured; every bit of the logits
    and of all state.
    """
    uncaptured: GraphFamily[None, Tensor] = GraphFamily(
        Kind.DECODE,
        1,
        rig.logits.sizes,
        [None],
        lambda rows, _: rig.step.forward(rows)[0],
        device=torch.device("cuda"),
    )
    for num_requests in (1, 3, 8, 3):
        before = [tensor.clone() for tensor in rig.state()]
        got = rig.logits.run(rig.rows(num_requests), None).clone()
        after = [tensor.clone() for tensor in rig.state()]
        for tensor, old in zip(rig.state(), before, strict=True):
            tensor.copy_(old)
        expected = uncaptured.run(rig.rows(num_requests), None)
        assert torch.equal(got[:num_requests], expected[:num_requests])
        for tensor, wanted in zip(rig.state(), after, strict=True):
            assert torch.equal(tensor, wanted)


def test_a_padded_step_changes_nothing_else(rig: Rig) -> None:
    """E5: 3 requests in a graph of 4, greedy and sampled. Oracle: copies of every idle slot,
    page and table row, and the pages of the active ones but for the row's own token."""
    for plan in (rig.steps.decode.variants[0], SAMPLED):
        before = [tensor.clone() for tensor in rig.state()]
        rig.steps.decode.run(rig.rows(3), plan)
        for name, old, new in zip(
            ("keys", "values", "conv", "state", "pages", "last"), before, rig.state(), strict=False
        ):
            if name in ("keys", "values"):
                written = [2 + 2 * i for i in range(3)]
                own = CONTEXT % PAGE_SIZE
                for page in range(1, old.shape[1]):
                    for offset in range(PAGE_SIZE):
                        if page in written and offset == own:
                            continue
                        assert torch.equal(old[:, page, offset], new[:, page, offset]), name
            elif name in ("conv", "state"):
                assert torch.equal(old[:, 4:], new[:, 4:]), name
                assert not torch.equal(old[:, 1:4], new[:, 1:4])
            else:
                assert torch.equal(old[4:], new[4:]), name


def test_a_moved_pool_is_refused(rig: Rig) -> None:
    """E5: a graph bound to an address is not replayed after it. Oracle: RuntimeError."""
    rig.steps.tables.page_table.set_(rig.steps.tables.page_table.clone())  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="has moved"):
        rig.steps.decode.run(rig.rows(1), rig.steps.decode.variants[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_and_overlap_change_no_token(family: str, tmp_path: Path) -> None:
    """E5, E4: mixed requests of many lengths. Oracle: the run without graphs and overlap; and
    nothing is compiled after the start."""
    case = CASES_BY_FAMILY[family][0]
    build_oracle(family, case).save_pretrained(tmp_path)
    prompts = [[(i * 7 + j) % case.vocab for j in range(1 + 5 * i)] for i in range(12)]
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            top_p=0.8,
            seed=i,
            max_tokens=1 + 3 * i,
            presence_penalty=0.3 * (i % 3),
            logprobs=2 if i % 4 == 0 else None,
        )
        for i in range(12)
    ]
    results = []
    for graphs, overlap in (("off", "off"), ("on", "off"), ("on", "on")):
        with LLM(
            str(tmp_path),
            device="cuda",
            dtype="float32",
            max_running_requests=5,
            max_kv_tokens=2048,
            max_prefill_tokens=48,
            page_size=PAGE_SIZE,
            cuda_graphs=graphs,
            overlap=overlap,
        ) as llm:
            outputs = llm.generate(prompts, params)
            results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
    assert results[0] == results[1] == results[2]
