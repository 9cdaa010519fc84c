"""E5 on CUDA: captured steps against the same calls uncaptured, and what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from engine import LLM, SamplingParams
from engine.cache.pools import CachePools
from engine.config import EngineConfig
from engine.device_facts import read_device_facts
from engine.model_config import load_model_config
from engine.models.hybrid import HybridModel, forward_block
from engine.plan import make_plan
from engine.start import allocate, count_weights, load_model
from engine.step_set import StepSet, build_steps, prepare_thread
from engine.token_step import SAMPLED, TokenStep
from engine.warm_up import prefill_sizes
from graphs.family import GraphFamily
from graphs.inputs import Kind
from graphs.rows import Row
from tests.oracle.tiny_models import CASES_BY_FAMILY, build_oracle

pytestmark = pytest.mark.gpu
FAMILIES = ["qwen3_5_text", "qwen3_5_moe"]
CONTEXT = 20
PAGE_SIZE = 16
MAX_PREFILL = 64


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


def build_rig(family: str, tmp_path: Path) -> Rig:
    """A rig of its own; compiling it takes most of a test."""
    build_oracle(family, CASES_BY_FAMILY[family][0]).save_pretrained(tmp_path)
    config = EngineConfig(
        model_path=str(tmp_path),
        device="cuda",
        dtype="float32",
        max_running_requests=8,
        max_kv_tokens=1024,
        max_prefill_tokens=MAX_PREFILL,
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


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps(family: str, tmp_path: Path) -> None:
    """E5: the three claims below, of one model whose blocks are compiled.

    And E5: blocks are compiled no more often than there are kinds of blocks times planned shapes.
    Oracle: Dynamo's entries for the code of a block.
    """
    torch._dynamo.reset()
    rig = build_rig(family, tmp_path)
    config = rig.model.config
    num_kinds = len(set(zip(config.layer_kinds, config.is_moe, strict=True)))
    prefills = prefill_sizes(config, torch.float32, torch.device("cuda"), MAX_PREFILL)
    num_shapes = len(rig.steps.decode.sizes) + len(prefills)
    num_compilations = len(_debug_get_cache_entry_list(forward_block.__code__))
    assert 0 < num_compilations <= num_kinds * num_shapes
    check_captured_logits(rig)
    check_padded_steps(rig)
    check_moved_pool(rig)


def check_captured_logits(rig: Rig) -> None:
    """Batch 1, 3 in a graph of 4, and 8, one after another, in turns on and off.

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


def check_padded_steps(rig: Rig) -> None:
    """3 requests in a graph of 4, greedy and sampled. Oracle: copies of every idle slot, page and
    table row, and the pages of the active ones but for the row's own token."""
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


def check_moved_pool(rig: Rig) -> None:
    """A graph bound to an address is not replayed after it. Oracle: RuntimeError."""
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
            compile="off",  # compiled and captured ones: test_overlap_trace.py
            cuda_graphs=graphs,
            overlap=overlap,
        ) as llm:
            outputs = llm.generate(prompts, params)
            results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
    assert results[0] == results[1] == results[2]
