"""Everything that runs steps: built from the plan, compiled, captured."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from engine.batch import MIN_TABLE_PAGES
from engine.cache.pools import CachePools
from engine.models.hybrid import (
    EAGER,
    ForwardFunctions,
    HybridModel,
    forward_block,
    forward_head,
)
from engine.plan import Plan
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from engine.token_step import (
    GREEDY,
    SAMPLED,
    SCORED,
    Chosen,
    StepFunctions,
    TokenStep,
    choose_tokens,
    prepare_rows,
)
from engine.warm_up import warm_up
from graphs.compile import allow_compilations, compile_whole
from graphs.family import GraphFamily
from graphs.inputs import Kind
from graphs.kernels.sample.reference import gumbel_noise
from graphs.sizes import family_sizes

logger = logging.getLogger(__name__)

EAGER_STEP = StepFunctions(
    forward=EAGER,
    prepare=prepare_rows,
    choose=choose_tokens,
    choose_any=choose_tokens,
    make_noise=gumbel_noise,
)


@dataclass(frozen=True)
class StepSet:
    """What a runner launches: the regions of a prefill, the decode family, and their tables."""

    functions: StepFunctions
    decode: GraphFamily[SamplingPlan, Chosen]
    tables: SlotTables
    sampling: SamplingTable


def prepare_thread(plan: Plan) -> None:
    """Set up the thread that launches steps: its limit of compilations, its stream."""
    kinds = set(zip(plan.model.layer_kinds, plan.model.is_moe, strict=True))
    allow_compilations(len(kinds))
    if plan.device.device.type == "cuda":
        # Graphs are captured and replayed on a stream of their own.
        torch.cuda.set_stream(torch.cuda.Stream())


def prepare_steps(
    plan: Plan, model: HybridModel, pools: CachePools
) -> tuple[StepSet, dict[str, float]]:
    """All that runs steps, compiled and captured, and the seconds of these phases."""
    device, started_s = plan.device.device, time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()  # weights and pools were made on another stream
    tables = SlotTables(
        plan.memory.num_slots,
        -(-plan.limits.max_request_tokens // plan.page_size) + MIN_TABLE_PAGES,
        device,
    )
    sampling = SamplingTable(plan.memory.num_slots, plan.model.vocab_size, device)
    functions = compile_functions() if plan.is_compiled else EAGER_STEP
    # On the CPU a plan of everything would sort the vocabulary for every request that samples:
    # there, all but greedy steps choose by their own plan, uncompiled.
    variants = (GREEDY, SAMPLED, SCORED) if device.type == "cuda" else (GREEDY,)
    step = TokenStep(model, functions, tables, sampling, plan.page_size, variants)
    decode = GraphFamily(
        Kind.DECODE,
        1,
        family_sizes(plan.max_running_requests),
        variants,
        step,
        device=device,
        bound=(*pools.tensors(), *tables.tensors(), *sampling.tensors()),
        pool=torch.cuda.graph_pool_handle() if plan.is_captured else None,
    )
    if plan.is_compiled:
        logger.info("compiling; the first start takes about a minute, later ones seconds")
    warm_up(
        model,
        functions,
        decode,
        sampling,
        device,
        max_prefill_rows=plan.max_prefill_tokens,
        page_size=plan.page_size,
    )
    compiled_s = time.monotonic()
    decode.capture()
    phases = {"compile": compiled_s - started_s, "capture": time.monotonic() - compiled_s}
    return StepSet(functions, decode, tables, sampling), phases


def compile_functions() -> StepFunctions:
    """The regions of a step, compiled when first called."""
    return StepFunctions(
        forward=ForwardFunctions(
            block=compile_whole(forward_block), head=compile_whole(forward_head)
        ),
        prepare=compile_whole(prepare_rows),
        choose=compile_whole(choose_tokens),
        choose_any=choose_tokens,
        make_noise=compile_whole(gumbel_noise),
    )
