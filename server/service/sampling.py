"""From request fields to `SamplingParams`: defaults of the checkpoint, ranges, token budget."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from engine.json_file import read_json_file
from engine.request import RequestLimits, SamplingParams, require_range
from server.errors import BadRequestError, refusal
from server.service.request_schema import GenerationFields

MAX_GENERATION_CONFIG_BYTES = 1 << 20
MAX_API_TEMPERATURE = 2.0
MAX_TOKEN_ID_DIGITS = 10

Value = TypeVar("Value", int, float)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that names no value gets; the plain defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _GenerationConfig(msgspec.Struct, frozen=True):
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The defaults that the checkpoint's generation_config.json asks for.

    Values it gives replace OpenAI's. With `do_sample` false its author asked for greedy
    output, so temperature is 0 and the sampling filters stay off.

    Raises:
        ValueError: the file cannot be read or a value in it is out of range.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    config = read_json_file(path, _GenerationConfig, max_bytes=MAX_GENERATION_CONFIG_BYTES)
    given = {
        name: value for name, value in msgspec.structs.asdict(config).items() if value is not None
    }
    is_greedy = given.pop("do_sample", None) is False
    if is_greedy:
        penalty = given.get("repetition_penalty", 1.0)
        defaults = SamplingDefaults(temperature=0.0, repetition_penalty=penalty)
    else:
        defaults = msgspec.convert(given, SamplingDefaults)
    try:
        require_range("temperature", defaults.temperature, 0.0, MAX_API_TEMPERATURE)
        SamplingParams(**msgspec.structs.asdict(defaults))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return defaults


class LogprobCounts(msgspec.Struct, frozen=True):
    """How many candidates to report per output and per prompt token; None is none at all."""

    output: int | None
    prompt: int | None


def build_params(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    limits: RequestLimits,
    *,
    max_tokens: int | None,
    logprobs: LogprobCounts,
    prompt_field: str,
) -> SamplingParams:
    """The sampling parameters of a request; `fit_budget` then cuts them to each prompt.

    Raises:
        BadRequestError: a value is out of range.
    """
    check_best_of(fields)
    if max_tokens is not None:
        max_tokens = min(max_tokens, limits.max_request_tokens)
    temperature = _either(fields.temperature, defaults.temperature)
    try:
        require_range("temperature", temperature, 0.0, MAX_API_TEMPERATURE)
        return SamplingParams(
            temperature=temperature,
            top_p=_either(fields.top_p, defaults.top_p),
            top_k=_either(fields.top_k, defaults.top_k),
            min_p=_either(fields.min_p, defaults.min_p),
            presence_penalty=_either(fields.presence_penalty, 0.0),
            frequency_penalty=_either(fields.frequency_penalty, 0.0),
            repetition_penalty=_either(fields.repetition_penalty, defaults.repetition_penalty),
            logit_bias=read_logit_bias(fields.logit_bias or {}),
            seed=fields.seed,
            n=fields.n,
            max_tokens=max_tokens,
            min_tokens=fields.min_tokens,
            stop=[] if fields.stop is None else fields.stop,
            stop_token_ids=fields.stop_token_ids or [],
            ignore_eos=fields.ignore_eos,
            include_stop_str_in_output=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            logprobs=logprobs.output,
            prompt_logprobs=logprobs.prompt,
        )
    except ValueError as error:
        raise refusal(error, prompt_field=prompt_field) from error


def fit_budget(
    params: SamplingParams, num_prompt_tokens: int, limits: RequestLimits
) -> SamplingParams:
    """`params` with max_tokens cut to what the window leaves after the prompt.

    A prompt that fills the window keeps its budget: `check_request` refuses it by name.

    Raises:
        ValueError: the window leaves less than min_tokens.
    """
    room = limits.max_request_tokens - num_prompt_tokens
    if room <= 0:
        return params
    asked = room if params.max_tokens is None else params.max_tokens
    return msgspec.structs.replace(params, max_tokens=min(asked, room))


def check_best_of(fields: GenerationFields) -> None:
    """Refuse to pick the best of more samples than are returned.

    Raises:
        BadRequestError: best_of is neither 1 nor n.
    """
    if fields.best_of not in (None, 1, fields.n):
        raise BadRequestError(
            f"best_of must be 1 or equal to n ({fields.n}); picking the best of more samples is "
            "not supported.",
            "best_of",
        )


def read_logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """JSON object keys as token ids.

    Raises:
        ValueError: a key is no token id.
    """
    read = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_TOKEN_ID_DIGITS):
            raise ValueError(f"logit_bias keys must be token ids, got {key[:32]!r}")
        read[int(key)] = value
    return read


def _either(asked: Value | None, default: Value) -> Value:
    return default if asked is None else asked
