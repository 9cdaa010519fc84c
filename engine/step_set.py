"""Everything that runs steps: built from the plan, compiled, captured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.choice import build_backend
from engine.cache.pools import CachePools
from engine.committed_state import committed_states
from engine.compile_cache import enable_disk_caches
from engine.models.hybrid import (
    EAGER,
    ForwardFunctions,
    HybridModel,
    forward_block,
    forward_group,
    forward_head,
)
from engine.plan import Plan
from engine.sampler import SamplingPlan
from engine.sampling_rows import SamplingTable
from engine.slot_tables import SlotTables
from engine.spec_protocol import DraftSizes, DraftTarget, SpecRuntime
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
from engine.verify_step import VerifyFunctions, VerifyStep, prepare_verify_rows
from engine.warm_up import WARM_UP_PAGES, warm_up
from graphs.compile import allow_compilations, compile_whole, kernels_analysed_once
from graphs.family import GraphFamily
from graphs.inputs import Kind
from graphs.kernels.kernel_set import (
    TORCH_SAMPLE,
    TRITON_SAMPLE,
    SampleKernels,
    torch_sample,
)
from graphs.kernels.sample.reference import vocabulary_noise
from graphs.sizes import family_sizes

# More blocks compile longer and gain little; groups of one pattern share a compilation.
CPU_BLOCKS_PER_GROUP = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSet:
    """What a runner launches: the regions of a prefill, a family, and their tables.

    `decode`: the family of decode steps, or with drafts of verify steps: there are no others then.
    """

    functions: StepFunctions
    decode: GraphFamily[SamplingPlan, Chosen]
    tables: SlotTables
    sampling: SamplingTable


def prepare_thread(plan: Plan) -> None:
    """Set up the thread that launches steps: its limit of compilations, its stream."""
    kinds = set(zip(plan.model.layer_kinds, plan.model.is_moe, strict=True))
    has_layer_of_drafts = plan.num_drafts > 0
    allow_compilations(len(kinds) + has_layer_of_drafts)
    enable_disk_caches()
    if plan.device.device.type == "cuda":
        # Graphs are captured and replayed on a stream of their own.
        torch.cuda.set_stream(torch.cuda.Stream())


def build_steps(
    plan: Plan, model: HybridModel, pools: CachePools, spec: SpecRuntime | None = None
) -> StepSet:
    """All that runs steps, compiled and not yet captured. `spec`: with it, steps verify drafts."""
    device = plan.device.device
    if device.type == "cuda":
        # Weights and pools were made on another stream, and what that freed helps no other.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    tables = SlotTables(
        plan.memory.num_slots,
        max(-(-plan.max_row_tokens // plan.page_size), WARM_UP_PAGES),
        device,
    )
    sampling = SamplingTable(plan.memory.num_slots, plan.model.vocab_size, device)
    kernels = sample_kernels(device, is_compiled=plan.is_compiled)
    functions = eager_functions(kernels)
    if plan.is_compiled:
        # With one request at most, no step would make the sizes of single blocks dynamic.
        has_groups = device.type == "cpu" and plan.max_running_requests > 1
        functions = compiled_functions(kernels, device, has_groups=has_groups)
    # On the CPU a plan of everything would sort the vocabulary for every request that samples:
    # there, all but greedy steps choose by their own plan, uncompiled.
    variants = (GREEDY, SAMPLED, SCORED) if device.type == "cuda" else (GREEDY,)
    step: TokenStep | VerifyStep
    if spec is None:
        step = TokenStep(model, functions, tables, sampling, plan.page_size, variants)
    else:
        spec.capture(draft_target(plan, model, functions.forward), draft_sizes(plan))
        step = build_verify_step(plan, model, pools, spec, functions, tables, sampling, variants)
    decode = GraphFamily(
        Kind.DECODE if spec is None else Kind.VERIFY,
        1 + plan.num_drafts,
        family_sizes(plan.max_running_requests),
        variants,
        step,
        device=device,
        bound=(*pools.tensors(), *tables.tensors(), *sampling.tensors()),
        pool=torch.cuda.graph_pool_handle() if plan.is_captured else None,
    )
    if plan.is_compiled:
        logger.info("compiling; the first start takes about a minute, later ones seconds")
    with kernels_analysed_once():
        warm_up(
            model,
            functions,
            decode,
            sampling,
            device,
            max_prefill_rows=plan.max_prefill_tokens,
            page_size=plan.page_size,
            take_features=spec.take_features if spec and spec.wants_features else None,
        )
    return StepSet(functions, decode, tables, sampling)


def draft_target(plan: Plan, model: HybridModel, forward: ForwardFunctions) -> DraftTarget:
    """What a draft method may use."""
    return DraftTarget(
        model=model,
        backend=build_backend(plan.prefill_backend, plan.decode_backend),
        forward=forward,
        model_path=plan.model_path,
        load_format=plan.load_format,
        dtype=plan.dtype,
        device=plan.device.device,
    )


def draft_sizes(plan: Plan) -> DraftSizes:
    """What a draft method allocates for."""
    return DraftSizes(
        batch_sizes=family_sizes(plan.max_running_requests),
        num_pages=plan.memory.num_pages,
        page_size=plan.page_size,
        num_slots=plan.memory.num_slots,
    )


def build_verify_step(
    plan: Plan,
    model: HybridModel,
    pools: CachePools,
    spec: SpecRuntime,
    functions: StepFunctions,
    tables: SlotTables,
    sampling: SamplingTable,
    variants: Sequence[SamplingPlan],
) -> VerifyStep:
    """The step of the verify family; `functions` are those of its prefills."""
    assert pools.scratch is not None
    is_cuda = plan.device.device.type == "cuda"
    commit_gdn = model.kernels.gdn_commit
    prepare, choose = prepare_verify_rows, spec.choose
    if plan.is_compiled:
        prepare = compile_whole(prepare)
        if not is_cuda:  # there both are kernels of ours already
            choose, commit_gdn = compile_whole(choose), compile_whole(commit_gdn)
    num_k_heads = plan.model.num_k_heads_gdn
    return VerifyStep(
        model,
        VerifyFunctions(functions.forward, prepare, choose, spec.choose, functions.kernels),
        tables,
        sampling,
        committed_states(pools, pools.scratch, tables, sampling, num_k_heads, commit_gdn),
        page_size=plan.page_size,
        rows_per_request=1 + plan.num_drafts,
        prepared=variants,
        take_features=spec.take_features if spec.wants_features else None,
        device_drafts=spec if spec.drafts_on_device else None,
    )


def eager_functions(kernels: SampleKernels) -> StepFunctions:
    """The regions of a step as they are."""
    return StepFunctions(EAGER, prepare_rows, choose_tokens, choose_tokens, kernels)


def compiled_functions(
    kernels: SampleKernels, device: torch.device, *, has_groups: bool
) -> StepFunctions:
    """The regions of a step, compiled when first called.

    On CUDA a token is chosen by a few kernels of ours, which stay as they are: to compile one of
    the three variants takes as long as to compile a block.
    """
    forward = ForwardFunctions(block=compile_whole(forward_block), head=compile_whole(forward_head))
    if has_groups:
        # There, calling compiled code is a sixth of a step of one row.
        forward = replace(
            forward, group=compile_whole(forward_group), blocks_per_group=CPU_BLOCKS_PER_GROUP
        )
    return StepFunctions(
        forward=forward,
        prepare=compile_whole(prepare_rows),
        choose=choose_tokens if device.type == "cuda" else compile_whole(choose_tokens),
        choose_any=choose_tokens,
        kernels=kernels,
    )


def sample_kernels(device: torch.device, *, is_compiled: bool) -> SampleKernels:
    """How tokens are chosen. On the CPU the noise is most of the work: it may be compiled."""
    if device.type == "cuda":
        return TRITON_SAMPLE
    return torch_sample(compile_whole(vocabulary_noise)) if is_compiled else TORCH_SAMPLE
