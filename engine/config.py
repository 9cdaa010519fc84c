"""What the user asked for, before anything is known about the model or the machine.

The fields of `EngineConfig` are the one list of engine options: the serve and batch flags
are generated from it and `LLM` takes a keyword of each name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,  # noqa: ANN401  (the field's annotation carries the type)
    help_text: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    is_for_speed_tests: bool = False,
) -> Any:  # noqa: ANN401
    """A dataclass field that is also a command-line flag.

    `aliases`: further names of the flag. `is_for_speed_tests`: outputs mean nothing with it, so
    only `deltaloom bench` has the flag.
    """
    metadata = {
        "help": help_text,
        "group": group,
        "choices": choices,
        "aliases": aliases,
        "is_for_speed_tests": is_for_speed_tests,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options. None means: derived from the model or the machine (see `engine.plan`)."""

    model_path: str = option("", "folder with config.json and safetensors", group="model")
    load_format: str = option(
        "auto",
        "auto reads the checkpoint; dummy makes random weights from config.json alone",
        group="model",
        choices=("auto", "dummy"),
    )
    dtype: str = option(
        "auto",
        "weights and activations; auto is float32 on CPU, the checkpoint's dtype on CUDA",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output in tokens (default: the model's)", group="model"
    )
    device: str = option(
        "auto", "auto is cuda when there is one", group="machine", choices=("auto", "cpu", "cuda")
    )
    num_threads: int | None = option(
        None, "CPU threads for tensor work (default: all cores but one)", group="machine"
    )
    compile: str = option(
        "auto",
        "compile the decoder blocks; off starts sooner and runs slower; auto is on",
        group="machine",
        choices=("auto", "on", "off"),
    )
    cuda_graphs: str = option(
        "auto",
        "capture each decode step as one CUDA graph; auto is on for cuda with triton attention",
        group="machine",
        choices=("auto", "on", "off"),
    )
    compile_cache: str | None = option(
        None,
        "folder that keeps compiled code between starts (default: deltaloom/compile in "
        "$XDG_CACHE_HOME or ~/.cache)",
        group="machine",
    )
    attention_backend: str = option(
        "auto",
        "paged attention: triton, torch, or two of them as prefill,decode; auto is triton on "
        "cuda, torch on the CPU",
        group="machine",
    )
    check_integrity: str = option(
        "off",
        "for debugging: check the accounting of pages and slots after each step; a fault ends the "
        "engine",
        group="machine",
        choices=("off", "on"),
    )
    tensor_parallel_size: int = option(
        1, "GPUs that share one model; more than 1 is not supported yet", group="machine"
    )
    state_dtype: str = option(
        "float32",
        "dtype of the recurrent GDN state",
        group="cache",
        choices=("float32", "bfloat16", "float16"),
    )
    page_size: int = option(64, "tokens in one page of the KV cache", group="cache")
    max_kv_tokens: int | None = option(
        None, "tokens the KV cache holds (default: what --memory-ratio leaves)", group="cache"
    )
    memory_ratio: float | None = option(
        None,
        "share of free memory for weights and caches (default: 0.9 on CUDA, 0.4 on CPU)",
        group="cache",
    )
    max_running_requests: int = option(
        64, "requests that decode together; each holds one GDN slot", group="scheduling"
    )
    max_queued_requests: int = option(
        1024, "requests that may wait; one more is refused", group="scheduling"
    )
    max_prefill_tokens: int | None = option(
        None,
        "prompt tokens in one step; smaller keeps running requests smoother "
        "(default: 512 on CPU, 8192 on CUDA)",
        group="scheduling",
    )
    overlap: str = option(
        "auto",
        "launch each step before the one before it is drained; auto is on for cuda",
        group="scheduling",
        choices=("auto", "on", "off"),
    )
    speculative_algorithm: str | None = option(
        None,
        "draft method: ngram, stub, or module:Class of a proposer of your own (default: none)",
        group="speculation",
        aliases=("--spec-algo",),
    )
    speculative_num_steps: int | None = option(
        None,
        "drafts of a request in one step, 1 to 7 (default: 3)",
        group="speculation",
        aliases=("--spec-num-steps",),
    )
    speculative_draft_model_path: str | None = option(
        None,
        "what the draft method reads, where it reads something",
        group="speculation",
        aliases=("--spec-draft-model",),
    )
    speculative_ngram_min_match_window_size: int | None = option(
        None,
        "tokens in the shortest match from which ngram drafts, at least 1 (default: 1)",
        group="speculation",
    )
    speculative_ngram_max_match_window_size: int | None = option(
        None,
        "tokens in the longest match that ngram looks for, at most 64 (default: 8)",
        group="speculation",
    )
    synthetic_acceptance: float | None = option(
        None,
        "for speed tests: tokens that a step commits on average, whatever the drafts are",
        group="speculation",
        is_for_speed_tests=True,
    )
    seed: int | None = option(
        None,
        "seeds requests that bring no seed (default: different every start)",
        group="scheduling",
    )
