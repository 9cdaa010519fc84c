"""From what the user asked, the model and the machine to one frozen plan.

Every refusal at start-up happens here, before anything large is allocated.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from engine.attention.choice import choose_backends, parse_backends
from engine.attention.paged import PAGED_BACKENDS
from engine.config import EngineConfig
from engine.device_facts import DeviceFacts
from engine.memory import (
    NO_DRAFTS,
    DraftMemory,
    FixedBytes,
    MemoryPlan,
    plan_memory,
    unit_bytes,
)
from engine.model_config import ModelConfig
from engine.request import RequestLimits
from engine.sampling_rows import MAX_EOS_TOKEN_IDS, sampling_bytes_per_slot
from engine.spec_plan import choose_speculation
from engine.step_memory import StepLimits, StepSettings, fixed_bytes

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_RATIO_CUDA = 0.9
DEFAULT_MEMORY_RATIO_CPU = 0.4
DEFAULT_PREFILL_TOKENS_CUDA = 8192
DEFAULT_PREFILL_TOKENS_CPU = 512
MAX_COUNT = 2**31 - 1
# What the Triton kernels are made and tested for.
MAX_HEAD_DIM = 256
MAX_HEAD_RATIO = 16
MAX_THREADS = 1024
POSITIVE_OPTIONS = frozenset(
    (
        "max_model_len",
        "num_threads",
        "page_size",
        "max_kv_tokens",
        "max_running_requests",
        "max_queued_requests",
        "max_prefill_tokens",
    )
)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Plan:
    """All decisions that the engine is built from."""

    model_path: Path
    model: ModelConfig
    load_format: str
    device: DeviceFacts
    dtype: torch.dtype
    state_dtype: torch.dtype
    is_compiled: bool
    is_captured: bool
    max_steps_in_flight: int
    prefill_backend: str
    decode_backend: str
    num_drafts: int
    has_checks: bool
    memory: MemoryPlan
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    limits: RequestLimits
    seed: int

    @property
    def rows_per_request(self) -> int:
        """Of a decode step, or with drafts of a verify step."""
        return 1 + self.num_drafts

    @property
    def max_row_tokens(self) -> int:
        """Tokens that the rows of one request can reach: drafts may lie beyond its length."""
        return self.limits.max_request_tokens + self.num_drafts


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    facts: DeviceFacts,
    num_weights: int,
    draft: DraftMemory = NO_DRAFTS,
) -> Plan:
    """Decide everything that `config` left open; `num_weights` counts the model's values.

    Raises:
        ValueError: an option is out of range or the model does not fit; names the flag.
    """
    check_options(config)
    check_eos_ids(model)
    is_cuda = facts.device.type == "cuda"
    num_drafts = draft.rows_per_request - 1
    prefill_backend, decode_backend = choose_backends(
        config.attention_backend,
        is_cuda=is_cuda,
        rows_per_request=draft.rows_per_request,
        may_capture=config.cuda_graphs != "off",
    )
    if is_cuda:
        check_kernel_shapes(model, uses_triton="triton" in (prefill_backend, decode_backend))
    settings = StepSettings(
        dtype=DTYPES[choose_dtype(config.dtype, model, is_cuda)],
        is_cuda=is_cuda,
        is_compiled=choose_switch(config.compile, auto=True),
        is_captured=choose_capture(config.cuda_graphs, is_cuda, decode_backend),
    )
    default_tokens = DEFAULT_PREFILL_TOKENS_CUDA if is_cuda else DEFAULT_PREFILL_TOKENS_CPU
    wanted_len = choose_model_len(config, model)
    steps = StepLimits(
        max_running_requests=config.max_running_requests,
        max_prefill_tokens=config.max_prefill_tokens or default_tokens,
        max_model_len=wanted_len,
        page_size=config.page_size,
    )
    fixed = fixed_bytes(model, steps, settings, num_weights=num_weights, draft=draft)
    memory = divide_memory(config, model, facts, settings, fixed, wanted_len, draft)
    max_kv_tokens = memory.num_pages * config.page_size - num_drafts
    return Plan(
        model_path=Path(config.model_path),
        model=model,
        load_format=config.load_format,
        device=facts,
        dtype=settings.dtype,
        state_dtype=DTYPES[config.state_dtype],
        is_compiled=settings.is_compiled,
        is_captured=settings.is_captured,
        # On the CPU a step in flight would only fight the event loop for the interpreter.
        max_steps_in_flight=2
        if num_drafts == 0 and choose_switch(config.overlap, auto=is_cuda)
        else 1,
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
        num_drafts=num_drafts,
        has_checks=config.check_integrity == "on",
        memory=memory,
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        max_prefill_tokens=steps.max_prefill_tokens,
        limits=RequestLimits(
            max_model_len=cut_model_len(config, wanted_len, max_kv_tokens),
            max_kv_tokens=max_kv_tokens,
            vocab_size=model.vocab_size,
        ),
        seed=secrets.randbits(63) if config.seed is None else config.seed,
    )


def divide_memory(
    config: EngineConfig,
    model: ModelConfig,
    facts: DeviceFacts,
    settings: StepSettings,
    fixed: FixedBytes,
    wanted_len: int,
    draft: DraftMemory,
) -> MemoryPlan:
    """Slots for the running requests, and as many pages as are of use and fit.

    Raises:
        ValueError: the model does not fit.
    """
    units = unit_bytes(
        model,
        dtype_bytes=settings.dtype.itemsize,
        state_dtype_bytes=DTYPES[config.state_dtype].itemsize,
        sampling_slot_bytes=sampling_bytes_per_slot(model.vocab_size),
        draft=draft,
    )
    # An explicit --max-model-len must fit whole; the model's own is cut to what fits.
    min_tokens = wanted_len if config.max_model_len is not None else 1
    # Drafts lie beyond the tokens of their request: those of one that fills the cache need room.
    num_drafts = draft.rows_per_request - 1
    wanted_tokens = config.max_running_requests * (wanted_len + num_drafts)
    if config.max_kv_tokens is not None:
        min_tokens = config.max_kv_tokens
        wanted_tokens = min_tokens + num_drafts
    default_ratio = DEFAULT_MEMORY_RATIO_CUDA if settings.is_cuda else DEFAULT_MEMORY_RATIO_CPU
    return plan_memory(
        units,
        fixed,
        free_bytes=facts.free_bytes,
        memory_ratio=default_ratio if config.memory_ratio is None else config.memory_ratio,
        num_slots=config.max_running_requests,
        page_size=config.page_size,
        wanted_pages=num_pages_for(wanted_tokens, config.page_size),
        min_pages=num_pages_for(min_tokens + num_drafts, config.page_size),
    )


def check_options(config: EngineConfig) -> None:
    """Refuse numbers and words that no model or machine could make right."""
    for option in fields(config):
        value = getattr(config, option.name)
        flag = "--" + option.name.replace("_", "-")
        choices = option.metadata["choices"]
        if choices:
            require(value in choices, f"{flag} must be one of {', '.join(choices)}, got {value!r}")
        elif value is not None and option.name in POSITIVE_OPTIONS:
            require(
                isinstance(value, int) and 1 <= value <= MAX_COUNT,
                f"{flag} must be in [1, {MAX_COUNT}], got {value!r}",
            )
    require(
        config.num_threads is None or config.num_threads <= MAX_THREADS,
        f"--num-threads must be in [1, {MAX_THREADS}], got {config.num_threads}",
    )
    require(
        config.tensor_parallel_size == 1,
        f"--tensor-parallel-size {config.tensor_parallel_size} is not supported: accepted is 1; "
        f"for more GPUs run a server on each and spread requests over them",
    )
    check_assertions(config, has_assertions=__debug__)
    parse_backends(config.attention_backend)
    choose_speculation(config)
    ratio = config.memory_ratio
    require(ratio is None or 0.0 < ratio <= 1.0, f"--memory-ratio must be in (0, 1], got {ratio}")
    require(
        config.seed is None or -(2**63) <= config.seed < 2**64,
        f"--seed must be a 64-bit number, got {config.seed}",
    )


def check_assertions(config: EngineConfig, *, has_assertions: bool) -> None:
    """Refuse checks that Python would leave out."""
    require(
        config.check_integrity == "off" or has_assertions,
        "--check-integrity on needs assertions: run Python without -O, or use off",
    )


def check_eos_ids(model: ModelConfig) -> None:
    """Refuse more end-of-sequence ids than the sampler can mask."""
    num_ids = len(model.eos_token_ids)
    require(
        num_ids <= MAX_EOS_TOKEN_IDS,
        f"eos_token_id has {num_ids} ids, at most {MAX_EOS_TOKEN_IDS} are supported",
    )


def choose_dtype(wanted: str, model: ModelConfig, is_cuda: bool) -> str:
    """auto: exact on CPU, the checkpoint's own on CUDA."""
    if wanted != "auto":
        return wanted
    return model.dtype if is_cuda else "float32"


def choose_switch(wanted: str, *, auto: bool) -> bool:
    """An option of auto, on and off."""
    return auto if wanted == "auto" else wanted == "on"


def choose_capture(wanted: str, is_cuda: bool, decode_backend: str) -> bool:
    """auto: wherever a decode step can be captured."""
    can_capture = is_cuda and PAGED_BACKENDS[decode_backend].capabilities.can_capture
    require(
        can_capture or wanted != "on",
        "--cuda-graphs on needs a CUDA device and --attention-backend triton; use auto",
    )
    return can_capture and wanted != "off"


def check_kernel_shapes(model: ModelConfig, *, uses_triton: bool) -> None:
    """Refuse head sizes that the CUDA kernels do not take; names the field of config.json."""
    if uses_triton:
        ratio = model.num_q_heads // model.num_kv_heads
        require(
            model.head_dim % 16 == 0 and 16 <= model.head_dim <= MAX_HEAD_DIM,
            f"head_dim {model.head_dim}: on cuda it must be a multiple of 16, at most "
            f"{MAX_HEAD_DIM}; use --attention-backend torch",
        )
        require(
            ratio <= MAX_HEAD_RATIO,
            f"num_attention_heads is {ratio} times num_key_value_heads: on cuda at most "
            f"{MAX_HEAD_RATIO}; use --attention-backend torch",
        )
    for field, size in (
        ("linear_key_head_dim", model.head_k_dim_gdn),
        ("linear_value_head_dim", model.head_v_dim_gdn),
    ):
        require(
            size % 16 == 0 and 16 <= size <= MAX_HEAD_DIM,
            f"{field} {size}: on cuda it must be a multiple of 16, at most {MAX_HEAD_DIM}; "
            f"use --device cpu",
        )


def choose_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence asked for, never beyond what the model's positions allow."""
    wanted = config.max_model_len
    if wanted is None:
        return model.max_position_embeddings
    require(
        wanted <= model.max_position_embeddings,
        f"--max-model-len {wanted} is beyond this model's {model.max_position_embeddings} "
        f"(max_position_embeddings in config.json)",
    )
    return wanted


def cut_model_len(config: EngineConfig, wanted_len: int, max_kv_tokens: int) -> int:
    """The longest sequence that the KV cache holds; what was asked for explicitly must fit."""
    if config.max_kv_tokens is not None and config.max_model_len is not None:
        require(
            max_kv_tokens >= config.max_model_len,
            f"--max-kv-tokens {config.max_kv_tokens} is less than --max-model-len "
            f"{config.max_model_len}; raise the one or lower the other",
        )
    if max_kv_tokens < wanted_len:
        logger.info("max_model_len is %d: that is what the KV cache holds", max_kv_tokens)
    return min(wanted_len, max_kv_tokens)


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens`, the last one perhaps in part."""
    return -(-num_tokens // page_size)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)
