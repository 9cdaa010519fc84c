"""Building an engine: plan, allocate, load, compile. Each step returns a value."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._inductor.exc import InvalidCxxCompiler

from engine.attention.choice import build_backend
from engine.attention.paged import TORCH_PAGED
from engine.attention.protocol import AttentionBackend
from engine.cache.allocator import IndexAllocator
from engine.cache.pools import CachePools, allocate_pools
from engine.client import EngineInfo, SpeculationInfo
from engine.compile_cache import (
    INDUCTOR_PART,
    TRITON_PART,
    compile_cache_key,
    use_compile_cache,
)
from engine.config import EngineConfig
from engine.device_facts import read_device_facts
from engine.draft_steps import release_ended, tell_drained
from engine.engine import Engine
from engine.kept_code import KeptCode
from engine.loader import fill_dummy, load_weights
from engine.memory import NO_DRAFTS, describe_memory
from engine.model_config import ModelConfig, load_model_config
from engine.models.build import build_model, plan_weights
from engine.models.hybrid import HybridModel
from engine.plan import Plan, make_plan
from engine.request import FinishReason, NewRequest, SamplingParams
from engine.request_state import RequestState
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.scheduler_limits import SchedulerLimits
from engine.spec_plan import check_verify_layers, choose_speculation
from engine.spec_protocol import SpecRuntime, SpecSettings, load_spec_runtime
from engine.startup import CAPTURE, COMPILE, LOAD, StartupClock, describe_startup
from engine.step_set import build_steps, prepare_thread
from engine.tokens import load_tokenizer
from engine.version import __version__
from graphs.kernels.kernel_set import TORCH_KERNELS, TRITON_KERNELS

logger = logging.getLogger(__name__)

DUMMY_SEED = 0
FIRST_OUTPUT_TOKENS = 3


def start_engine(config: EngineConfig, *, has_progress: bool) -> Engine:
    """An engine that is ready to `run`, with every planned shape compiled and captured.

    Raises:
        ValueError: an option, the checkpoint or its tokenizer is unusable; one line, names it.
    """
    clock = StartupClock()
    folder = Path(config.model_path)
    if not folder.is_dir():
        raise ValueError(f"--model-path {config.model_path!r} is not a folder")
    torch.set_num_threads(config.num_threads or default_threads())
    model_config = load_model_config(folder)
    facts = read_device_facts(config.device)
    settings = choose_speculation(config)
    spec = None if settings is None else load_spec_runtime(settings, model_config)
    draft = NO_DRAFTS if spec is None else spec.memory
    plan = make_plan(config, model_config, facts, count_weights(model_config), draft)
    if spec is not None:
        backend = build_backend(plan.prefill_backend, plan.decode_backend)
        check_verify_layers(meta_model(model_config, backend), plan.num_drafts)
    tokenizer = load_tokenizer(folder)
    logger.info(describe_memory(plan.memory))
    with keep_compiled_code(plan, config):
        scheduler, runner = start_steps(plan, clock, spec, has_progress=has_progress)
    startup_s = clock.finish()
    logger.info("ready: %s", describe_startup(startup_s))
    info = describe(plan, startup_s, settings)
    return Engine(info, scheduler, runner, tokenizer, plan.seed, spec, has_checks=plan.has_checks)


def start_steps(
    plan: Plan, clock: StartupClock, spec: SpecRuntime | None, *, has_progress: bool
) -> tuple[Scheduler, Runner]:
    """A scheduler and a runner that have served a request: loaded, compiled, captured."""
    with clock.phase(LOAD):
        pools = allocate(plan)
        model = load_model(plan, pools, has_progress=has_progress)
    thread = ThreadPoolExecutor(1, "launch", initializer=prepare_thread, initargs=(plan,))
    try:
        with clock.phase(COMPILE):
            steps = thread.submit(build_steps, plan, model, pools, spec).result()
        with clock.phase(CAPTURE):
            thread.submit(steps.decode.capture).result()
    except Exception as fault:
        thread.shutdown()
        if needs_compiler(fault):
            raise ValueError(
                "compiling needs a C++ compiler (g++): install one or use --compile off"
            ) from fault
        raise
    runner = Runner(
        model,
        steps,
        thread,
        page_size=plan.page_size,
        eos_token_ids=plan.model.eos_token_ids,
        device=plan.device.device,
        spec=spec,
    )
    scheduler = build_scheduler(plan)
    serve_first_request(scheduler, runner, spec, plan.limits.max_request_tokens)
    return scheduler, runner


@contextmanager
def keep_compiled_code(plan: Plan, config: EngineConfig) -> Iterator[None]:
    """Keep what is compiled in here for the next start, if no error ends it."""
    if not plan.is_compiled:
        yield
        return
    key = compile_cache_key(plan.model, plan.device, (plan.dtype, plan.state_dtype))
    root = Path(config.compile_cache) if config.compile_cache else None
    folder = use_compile_cache(key, root)
    try:
        kept_code = KeptCode(folder, (INDUCTOR_PART, TRITON_PART))
    except OSError as fault:  # a file system without locks, say; code is kept there unchecked
        logger.warning("compiled code in %s is not checked: %s", folder, fault)
        yield
        return
    try:
        yield
        kept_code.record()
    finally:
        kept_code.close()


def serve_first_request(
    scheduler: Scheduler, runner: Runner, spec: SpecRuntime | None, max_request_tokens: int
) -> None:
    """Take one made-up request through every part of a step, so that none is new to a user's."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=min(FIRST_OUTPUT_TOKENS, max_request_tokens - 1),
        ignore_eos=True,
    )
    request = NewRequest(request_id="start-up", prompt_token_ids=[0], params=params)
    state = RequestState(request=request, seed=0, output_text=None)
    scheduler.submit(state)
    while (batch := scheduler.next_batch()) is not None:
        result = runner.launch(batch).result()
        updates = scheduler.drain(batch, result)
        if spec is not None:
            tell_drained(spec, batch, result)
            release_ended(spec, updates)
    assert not scheduler.has_work
    scheduler.forget_counts()
    if state.finish_reason is FinishReason.ERROR:
        logger.warning("the first request, at start-up, failed: %s", state.error)
    runner.expect_no_compilation()


def needs_compiler(fault: BaseException | None) -> bool:
    """Whether a compilation failed for want of a compiler."""
    while fault is not None:
        if isinstance(fault, InvalidCxxCompiler):
            return True
        fault = fault.__cause__ or fault.__context__
    return False


def default_threads() -> int:
    """All cores this process may use but one, which is left to the HTTP process."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def count_weights(config: ModelConfig) -> int:
    """Number of weight values, from shapes alone."""
    return sum(parameter.numel() for parameter in meta_model(config, TORCH_PAGED).parameters())


def meta_model(config: ModelConfig, backend: AttentionBackend) -> HybridModel:
    """The model without memory: its layers and shapes."""
    meta = torch.device("meta")
    pools = allocate_pools(
        config,
        num_pages=1,
        page_size=1,
        num_slots=1,
        dtype=torch.float32,
        state_dtype=torch.float32,
        device=meta,
    )
    return build_model(config, pools, backend, TORCH_KERNELS, torch.float32, meta)


def allocate(plan: Plan) -> CachePools:
    """The cache pools of the plan."""
    memory = plan.memory
    return allocate_pools(
        plan.model,
        num_pages=memory.num_pages,
        page_size=plan.page_size,
        num_slots=memory.num_slots,
        dtype=plan.dtype,
        state_dtype=plan.state_dtype,
        device=plan.device.device,
        rows_per_request=plan.rows_per_request,
    )


def load_model(plan: Plan, pools: CachePools, *, has_progress: bool) -> HybridModel:
    """The model with its weights, read from the checkpoint or made up."""
    device = plan.device.device
    backend = build_backend(plan.prefill_backend, plan.decode_backend)
    kernels = TRITON_KERNELS if device.type == "cuda" else TORCH_KERNELS
    model = build_model(plan.model, pools, backend, kernels, plan.dtype, device)
    if plan.load_format == "dummy":
        fill_dummy(model.parameters(), DUMMY_SEED)
    else:
        load_weights(
            plan.model_path, lambda names: plan_weights(model, names), device, progress=has_progress
        )
    return model


def build_scheduler(plan: Plan) -> Scheduler:
    """The scheduler with all pages and slots free."""
    limits = SchedulerLimits(
        max_running_requests=plan.max_running_requests,
        max_queued_requests=plan.max_queued_requests,
        max_prefill_tokens=plan.max_prefill_tokens,
        max_request_tokens=plan.limits.max_request_tokens,
        page_size=plan.page_size,
        max_steps_in_flight=plan.max_steps_in_flight,
        num_drafts=plan.num_drafts,
    )
    return Scheduler(
        limits,
        IndexAllocator("KV pages", plan.memory.num_pages),
        IndexAllocator("GDN slots", plan.memory.num_slots),
        plan.model.eos_token_ids,
    )


def describe(plan: Plan, startup_s: dict[str, float], settings: SpecSettings | None) -> EngineInfo:
    """What clients may know of the plan."""
    return EngineInfo(
        version=__version__,
        model_type=plan.model.model_type,
        dtype=str(plan.dtype).removeprefix("torch."),
        device=plan.device.name,
        limits=plan.limits,
        eos_token_ids=list(plan.model.eos_token_ids),
        page_size=plan.page_size,
        num_pages=plan.memory.num_pages,
        num_slots=plan.memory.num_slots,
        max_running_requests=plan.max_running_requests,
        startup_s=startup_s,
        memory=plan.memory,
        speculation=None
        if settings is None
        else SpeculationInfo(
            algorithm=settings.algorithm,
            num_drafts=settings.num_drafts,
            draft_model_path=settings.draft_model_path,
        ),
    )
