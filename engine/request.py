"""What a caller asks for and what comes back: the values that cross every boundary.

These structs travel over the socket between the HTTP and the engine process as they are,
so they hold plain data only and know nothing about tensors, pages or slots.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SEED = 2**64 - 1

INTEGER_FIELDS = (
    "top_k",
    "n",
    "min_tokens",
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
)
NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class FinishReason(StrEnum):
    """Why a request ended. `ERROR` is a fault of this one request; the engine goes on."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it ends.

    `temperature` 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off.
    `max_tokens` None means up to the model's window. `logprobs` None is off, 0 reports the
    chosen token, n > 0 the n likeliest too (raw log-softmax, before penalties and masks);
    `prompt_logprobs` likewise for the prompt. Repetition penalty looks at prompt and output,
    presence and frequency penalty at the output only. With n > 1, choice i of a seeded
    request samples with seed + i.

    Raises:
        ValueError: a value is out of range; the message names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            require_range(name, getattr(self, name), low, high)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not (math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 100.0):
            raise ValueError(
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}"
            )
        require_range("top_k", self.top_k, -1, 2**31 - 1)
        require_range("n", self.n, 1, MAX_CHOICES)
        require_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            require_range("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
                )
        if self.seed is not None:
            require_range("seed", self.seed, -(2**63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_range(name, getattr(self, name), 0, MAX_TOP_LOGPROBS)
        self._check_stops()
        self._check_logit_bias()

    def _check_types(self) -> None:
        # A struct checks types when it is decoded, not when Python code makes one.
        for name in INTEGER_FIELDS:
            value = getattr(self, name)
            if value is not None and not is_integer(value):
                raise ValueError(f"{name} must be an integer, got {value!r}")
        for name in NUMBER_FIELDS:
            value = getattr(self, name)
            if not is_integer(value) and not isinstance(value, float):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if not all(isinstance(text, str) for text in self.stop_strings):
            raise ValueError(f"stop must be a string or a list of strings, got {self.stop!r}")
        if not all(is_integer(token_id) for token_id in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")
        if not all(is_integer(token_id) for token_id in self.logit_bias):
            raise ValueError("logit_bias must map token ids to numbers")

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ValueError(f"stop takes at most {MAX_STOP_STRINGS} strings")
        for text in self.stop_strings:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise ValueError(f"stop strings must have 1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids")

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIAS} token ids")
        for bias in self.logit_bias.values():
            require_range("logit_bias values", bias, -100.0, 100.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whatever form the caller used."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Temperatures below 1e-5 overflow the scaled logits; they mean greedy."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether the sampler must count tokens for this request."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def is_integer(value: object) -> bool:
    """Whether a value counts as an int; True and False do not."""
    return isinstance(value, int) and not isinstance(value, bool)


def require_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError naming `name` unless low <= value <= high (NaN is refused)."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one position's token and of the likeliest ones there.

    `top` is sorted, best first, and holds exactly as many entries as were asked for.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to complete once. n > 1 becomes n of these before the engine sees it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one drain committed for one request.

    `token_ids` are the newly committed tokens, a token that completed a stop string and an
    EOS included; nothing after them was committed. `logprobs` has one entry per new token
    when asked for. `prompt_logprobs` comes once, with the first update: one entry per prompt
    token, the first None. `stop_reason` is the stop string or stop token id that ended the
    request, None for EOS and for length. `error` explains FinishReason.ERROR;
    `is_user_error` says that the request itself was at fault (HTTP 400, not 500). `queue_s`
    comes with the first update: seconds from submission to the first admission, None when the
    request was never admitted. `num_drafted` and `num_accepted` count the request's drafts so far
    that were scored, and that became tokens.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_user_error: bool = False
    queue_s: float | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may at most ask of this engine.

    `max_model_len`: prompt plus output tokens. `max_kv_tokens`: tokens that all KV pages
    hold together. `vocab_size`: rows of the embedding; larger token ids do not exist.
    """

    max_model_len: int
    max_kv_tokens: int
    vocab_size: int

    @property
    def max_request_tokens(self) -> int:
        """The longest sequence one request can ever reach."""
        return min(self.max_model_len, self.max_kv_tokens)


class ContextLengthError(ValueError):
    """The prompt can never fit. The message has the wording that clients match on."""


def check_request(request: NewRequest, limits: RequestLimits) -> None:
    """Refuse what this engine can never serve.

    Raises:
        ContextLengthError: the prompt leaves no room for a single token.
        ValueError: the prompt is empty or a token id does not exist.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise ValueError("prompt must hold at least one token")
    for field, ids in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", request.params.stop_token_ids),
        ("logit_bias", request.params.logit_bias),
    ):
        for token_id in ids:
            if not is_integer(token_id):
                raise ValueError(f"{field}: token ids must be integers, got {token_id!r}")
            if not 0 <= token_id < limits.vocab_size:
                raise ValueError(
                    f"{field}: token id {token_id} is outside the vocabulary "
                    f"(0 to {limits.vocab_size - 1})"
                )
    # With max_tokens 0 (prompt scoring) the prompt may fill the window.
    room = 0 if request.params.max_tokens == 0 else 1
    if num_prompt + room > limits.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, "
            f"your prompt has {num_prompt} tokens, which leaves no room for output. "
            f"Shorten the prompt."
        )
    if num_prompt + room > limits.max_kv_tokens:
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_kv_tokens} tokens. However, "
            f"your prompt has {num_prompt} tokens: the KV cache holds {limits.max_kv_tokens} "
            f"tokens in all (raise --memory-ratio or --max-kv-tokens)."
        )


def rejection(request_id: str, error: ValueError) -> RequestUpdate:
    """The only update of a request that was refused."""
    return RequestUpdate(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        is_user_error=True,
    )


def split_choices(request: NewRequest) -> list[NewRequest]:
    """The n single-choice requests of one; choice i of a seeded request has seed + i."""
    params = request.params
    if params.n == 1:
        return [request]
    choices = []
    for index in range(params.n):
        seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
        choices.append(
            NewRequest(
                request_id=f"{request.request_id}-{index}",
                prompt_token_ids=request.prompt_token_ids,
                params=msgspec.structs.replace(params, n=1, seed=seed),
            )
        )
    return choices


def score_prompt_once(choices: list[NewRequest]) -> list[NewRequest]:
    """The choices of one prompt, of which only the first reports the prompt's scores."""
    return choices[:1] + [
        msgspec.structs.replace(
            choice, params=msgspec.structs.replace(choice.params, prompt_logprobs=None)
        )
        for choice in choices[1:]
    ]
