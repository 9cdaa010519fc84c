"""A model with made-up weights, compiled and captured steps and filled caches, to measure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import build_chunks
from engine.cache.pools import CachePools
from engine.config import EngineConfig
from engine.device_facts import read_device_facts
from engine.layers.mlp import MoeMlp
from engine.memory import NO_DRAFTS
from engine.model_config import load_model_config
from engine.models.hybrid import EAGER, DecoderBlock, HybridModel
from engine.plan import Plan, make_plan
from engine.request import SamplingParams
from engine.spec_plan import choose_speculation
from engine.spec_protocol import load_spec_runtime
from engine.start import allocate, count_weights, keep_compiled_code, load_model
from engine.startup import CAPTURE, COMPILE, LOAD, StartupClock
from engine.step_set import StepSet, build_steps, prepare_thread
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.moe.ops import route
from graphs.rows import Row

GEOMETRIES = Path(__file__).parent / "geometries"
PREFILL_TOKENS = 8192
EXTRA_TOKENS = 128
SAMPLED_PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.95,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
)


@dataclass(frozen=True)
class StepModel:
    """One geometry on the GPU, with slots and pages for `batch` requests of `context` tokens."""

    plan: Plan
    pools: CachePools
    model: HybridModel
    steps: StepSet
    startup_s: dict[str, float]
    batch: int
    context: int

    @property
    def pages_per_request(self) -> int:
        return -(-(self.context + EXTRA_TOKENS) // self.plan.page_size)

    def page_table(self, requests: range) -> Tensor:
        """Each request's pages, scattered over the pool as they would be after a while."""
        generator = torch.Generator().manual_seed(3)
        num_pages = self.batch * self.pages_per_request
        pages = 1 + torch.randperm(num_pages, generator=generator)
        table = pages.view(self.batch, -1)[requests.start : requests.stop]
        return table.to(self.plan.device.device)

    def inputs(self, kind: Kind, requests: range, start: int, num_rows: int) -> ForwardInputs:
        """Rows start to start + num_rows of each request, every row another random token."""
        device = self.plan.device.device
        table = self.page_table(requests)
        positions = torch.arange(start, start + num_rows, device=device).repeat(len(requests))
        row_starts = list(range(0, len(requests) * num_rows + 1, num_rows))
        page_size = self.plan.page_size
        pages = table[:, positions[:num_rows] // page_size].flatten()
        is_prefill = kind is Kind.PREFILL
        chunks, chunk_starts = build_chunks(row_starts) if is_prefill else ([], [])
        context_len = start + num_rows
        return ForwardInputs(
            kind=kind,
            token_ids=torch.randint(
                self.plan.model.vocab_size, (len(requests) * num_rows,), device=device
            ),
            positions=positions,
            kv_slots=pages * page_size + positions % page_size,
            page_table=table[:, : -(-context_len // page_size)].contiguous(),
            context_lens=torch.full((len(requests),), context_len, device=device),
            state_slots=torch.arange(1 + requests.start, 1 + requests.stop, device=device),
            logit_rows=torch.tensor(row_starts[1:], device=device) - 1,
            row_starts=torch.tensor(row_starts, device=device),
            chunks=torch.tensor(chunks, dtype=torch.int64, device=device),
            chunk_starts=torch.tensor(chunk_starts, dtype=torch.int64, device=device),
        )

    def prefill_steps(self) -> Iterator[ForwardInputs]:
        """The prompts of all requests, in pieces of at most PREFILL_TOKENS tokens."""
        at_once = max(PREFILL_TOKENS // self.context, 1)
        num_rows = min(self.context, PREFILL_TOKENS)
        for first in range(0, self.batch, at_once):
            requests = range(first, min(first + at_once, self.batch))
            for start in range(0, self.context, num_rows):
                yield self.inputs(Kind.PREFILL, requests, start, num_rows)

    def run(self, inputs: ForwardInputs) -> Tensor:
        """One forward, compiled, and the likeliest token of each request."""
        return self.model(inputs, self.steps.functions.forward).argmax(-1)

    def step_rows(self, batch: int, output_index: int) -> list[Row]:
        """The next rows of each of the first requests, every one another random token.

        One a request, or those of a verify step.
        """
        num_rows = self.plan.rows_per_request
        table = self.page_table(range(batch)).cpu()
        generator = torch.Generator().manual_seed(4)
        shape = batch, num_rows
        tokens = torch.randint(self.plan.model.vocab_size, shape, generator=generator).tolist()
        return [
            Row(
                slot=1 + index,
                position=self.context + row,
                page=int(table[index, (self.context + row) // self.plan.page_size]),
                output_index=output_index + row,
                token_id=token,
            )
            for index, row_tokens in enumerate(tokens)
            for row, token in enumerate(row_tokens)
        ]

    def fill_tables(self) -> None:
        """Tell the device every request's pages, and sampling parameters that use everything."""
        requests = range(self.batch)
        slots = torch.arange(1, 1 + self.batch, device=self.plan.device.device)
        self.steps.tables.set_pages(slots, self.page_table(requests))
        for index in requests:
            self.steps.sampling.set_row(
                1 + index,
                SAMPLED_PARAMS,
                seed=index,
                eos_ids=self.plan.model.eos_token_ids,
                prompt_token_ids=[index, index + 1],
                output_token_ids=[],
            )

    def distinct_experts(self, inputs: ForwardInputs) -> list[int]:
        """Experts that a step hits, of each MoE layer; runs the step."""
        hit: list[int] = []

        def count(x: Tensor, router: Tensor, *args: Tensor | int | bool) -> Tensor:
            _, expert_ids = route(x, router, mlp.top_k, mlp.renormalise)
            hit.append(len(expert_ids.unique()))
            out: Tensor = original.moe_mlp(x, router, *args)
            return out

        layers = [b.mlp for b in self.model.blocks if isinstance(b, DecoderBlock)]
        moe_layers = [mlp for mlp in layers if isinstance(mlp, MoeMlp)]
        for mlp in moe_layers:
            original = mlp.kernels
            mlp.kernels = dataclasses.replace(original, moe_mlp=count)
        self.model(inputs, EAGER)
        for mlp in moe_layers:
            mlp.kernels = original
        return hit

    def step_bytes(self, batch: int, experts_hit: list[int]) -> int:
        """What a decode step must move: weights (experts hit only), states twice, keys, values."""
        config, plan = self.plan.model, self.plan
        embedding = 0 if config.tie_word_embeddings else self.model.embedding.numel()
        num_weights = sum(p.numel() for p in self.model.parameters()) - embedding
        expert_size = 3 * config.moe_intermediate_size * config.hidden_size
        num_weights -= sum(config.num_experts - count for count in experts_hit) * expert_size
        state = math.prod(self.pools.state.shape[2:]) * self.pools.state.shape[0]
        kv = 2 * math.prod(self.pools.keys.shape[3:]) * self.pools.keys.shape[0]
        return (
            num_weights * plan.dtype.itemsize
            + 2 * batch * state * plan.state_dtype.itemsize
            + batch * self.context * kv * plan.dtype.itemsize
        )


@torch.inference_mode(mode=False)
def build(
    geometry: str, batch: int, context: int, compile_blocks: str, num_drafts: int = 0
) -> StepModel:
    """The model on the GPU, weights random, steps captured; `compile_blocks` as --compile.

    With drafts, steps verify so many of each request. Random ones are rejected; a commit takes as
    long for one row as for several.
    Outside inference mode, as a server is: code is compiled, and kept, for tensors made there.
    """
    folder = GEOMETRIES / geometry
    config = EngineConfig(
        model_path=str(folder),
        load_format="dummy",
        device="cuda",
        dtype="bfloat16",
        compile=compile_blocks,
        max_running_requests=batch,
        max_kv_tokens=batch * (context + EXTRA_TOKENS),
        speculative_algorithm="stub" if num_drafts else None,
        speculative_num_steps=num_drafts or None,
    )
    model_config = load_model_config(folder)
    settings = choose_speculation(config)
    spec = None if settings is None else load_spec_runtime(settings, model_config)
    plan = make_plan(
        config,
        model_config,
        read_device_facts("cuda"),
        count_weights(model_config),
        NO_DRAFTS if spec is None else spec.memory,
    )
    clock = StartupClock()
    with clock.phase(LOAD):
        pools = allocate(plan)
        model = load_model(plan, pools, has_progress=False)
    prepare_thread(plan)
    with keep_compiled_code(plan, config):
        with clock.phase(COMPILE):
            steps = build_steps(plan, model, pools, spec)
        with clock.phase(CAPTURE):
            steps.decode.capture()
    step_model = StepModel(plan, pools, model, steps, clock.finish(), batch, context)
    step_model.fill_tables()
    return step_model
