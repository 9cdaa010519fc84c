"""E5 on CUDA: torch.compile sees our kernels, and they can be captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from engine.models.hybrid import EAGER, ForwardFunctions, forward_block, forward_head
from graphs.inputs import Kind
from tests.engine.model_driver import ModelDriver, Setting, build_inputs
from tests.oracle.tiny_models import CASES_BY_FAMILY, build_oracle

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FAMILIES = ["qwen3_5_text", "qwen3_5_moe"]


def make_driver(family: str, folder: Path) -> ModelDriver:
    build_oracle(family, CASES_BY_FAMILY[family][0]).save_pretrained(folder)
    return ModelDriver(folder, Setting(CUDA, is_triton=True))


@pytest.mark.parametrize("kind", [Kind.PREFILL, Kind.DECODE])
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_become_graphs_of_our_kernels(family: str, kind: Kind, tmp_path: Path) -> None:
    """E5: a compiled block has nodes for our kernels' launches and no opaque op of ours.

    Oracle: the nodes of the functional graphs that torch.compile hands to its backend.
    """
    driver = make_driver(family, tmp_path)
    targets: list[str] = []

    def record(graph: GraphModule, _: list[torch.Tensor]) -> GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    backend = aot_autograd(fw_compiler=record, inference_compiler=record)
    run = ForwardFunctions(
        block=torch.compile(forward_block, backend=backend, fullgraph=True), head=forward_head
    )
    requests = [driver.start(range(1, 9)), driver.start(range(11, 19))]
    spans = [(request, 3 if kind is Kind.PREFILL else 1) for request in requests]
    with torch.inference_mode():
        driver.model(build_inputs(kind, spans, 0, CUDA), run)
    assert any("triton_kernel_wrapper" in target for target in targets)
    assert not [target for target in targets if "deltaloom" in target]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_decode_step_repeats_the_eager_one(family: str, tmp_path: Path) -> None:
    """E5: one CUDA graph of a whole decode step. Oracle: the same step, eager; every bit."""
    driver = make_driver(family, tmp_path)
    requests = [driver.start(range(1, 9)), driver.start(range(11, 19))]
    driver.prefill([(request, 7) for request in requests])
    inputs = build_inputs(Kind.DECODE, [(request, 1) for request in requests], 1, CUDA)
    pools = [driver.pools.conv, driver.pools.state, driver.pools.keys, driver.pools.values]
    before = [pool.clone() for pool in pools]

    def restore() -> None:
        for pool, old in zip(pools, before, strict=True):
            pool.copy_(old)

    with torch.inference_mode():
        expected = driver.model(inputs, EAGER)[:2].clone()
        after = [pool.clone() for pool in pools]
        restore()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = driver.model(inputs, EAGER)
        restore()
        for _ in range(2):
            restore()
            graph.replay()
            assert torch.equal(captured[:2], expected)
            for pool, wanted in zip(pools, after, strict=True):
                assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
