"""A trace of mixed requests on a tiny model, and how each must end by what it says unstopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models

from engine import LLM, FinishReason, SamplingParams
from engine.llm import CompletionOutput, RequestOutput
from tests.oracle.tiny_models import CASES_BY_FAMILY, build_oracle

EOS_IDS = (5, 11)
NUM_OUTPUT = 12
MAX_PROMPT = 40
ENDINGS = ("length", "eos", "stop id", "stop string", "all of them", "min tokens")
# How tokens are chosen; every request that samples brings its seed.
CHOICES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.1, top_p=0.9, top_k=30),
    SamplingParams(temperature=0.8, presence_penalty=0.8, frequency_penalty=0.4, min_p=0.02),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
)


@dataclass(frozen=True)
class TracedRequest:
    """One prompt, how it ends (one of ENDINGS), and at which output token it is meant to."""

    prompt: list[int]
    params: SamplingParams
    ending: str
    position: int


@dataclass(frozen=True)
class Outcome:
    """All that a caller is billed for and told about one completion."""

    num_prompt: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    text: str
    num_logprobs: int | None
    num_prompt_logprobs: int | None


def save_checkpoint(family: str, folder: Path) -> int:
    """A tiny checkpoint with a tokenizer and EOS ids; the size of its vocabulary."""
    case = CASES_BY_FAMILY[family][0]
    build_oracle(family, case).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_IDS}))
    vocab = {token_text(token_id): token_id for token_id in range(case.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=token_text(0)))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return case.vocab


def token_text(token_id: int) -> str:
    """The two characters of a token, such as c7."""
    return f"{chr(ord('a') + token_id // 10)}{token_id % 10}"


def unstopped_requests(num_requests: int, vocab: int) -> list[TracedRequest]:
    """Requests that nothing but their length ends, of every way to choose tokens."""
    requests = []
    for index in range(num_requests):
        block, choice = divmod(index, len(CHOICES))
        cycle, ending = divmod(block, len(ENDINGS))
        has_eos = ENDINGS[ending] in ("eos", "min tokens")
        params = msgspec.structs.replace(
            CHOICES[choice],
            seed=index,
            n=2 if index % 13 == 5 else 1,
            max_tokens=NUM_OUTPUT,
            ignore_eos=True,
            # Random weights say EOS once in fifty tokens; this makes it one in ten.
            logit_bias=dict.fromkeys(EOS_IDS, 1.5) if has_eos else {},
            logprobs=index % 4 if index % 3 == 0 else None,
            prompt_logprobs=1 if index % 11 == 0 else None,
        )
        num_prompt = 1 + index * 17 % MAX_PROMPT
        prompt = [(index * 31 + place * place * 7 + place) % vocab for place in range(num_prompt)]
        position = (cycle * len(CHOICES) + choice) % NUM_OUTPUT
        requests.append(TracedRequest(prompt, params, ENDINGS[ending], position))
    return requests


def stopped_requests(
    unstopped: Sequence[TracedRequest], outputs: Sequence[RequestOutput]
) -> list[TracedRequest]:
    """The same requests with what ends them, as near as can be to their positions."""
    return [
        TracedRequest(
            request.prompt,
            msgspec.structs.replace(
                request.params, **end_fields(request, output.outputs[0].token_ids)
            ),
            request.ending,
            request.position,
        )
        for request, output in zip(unstopped, outputs, strict=True)
    ]


def end_fields(request: TracedRequest, token_ids: list[int]) -> dict[str, object]:
    """The fields of the parameters that end a request whose unstopped tokens are these."""
    position = request.position
    stop_id = token_ids[nearest_first(token_ids, position)]
    # Two tokens' text: the match begins inside the token before.
    texts = [token_text(token_id) for token_id in token_ids]
    pieces = [texts[0], *(left[-1] + right for left, right in pairwise(texts))]
    stop_string = pieces[nearest_first(pieces, position)]
    match request.ending:
        case "length":
            return {"max_tokens": position + 1}
        case "eos":
            return {"ignore_eos": False}
        case "stop id":
            return {"stop_token_ids": [stop_id]}
        case "stop string":
            return {"stop": stop_string, "include_stop_str_in_output": position % 2 == 0}
        case "all of them":
            return {
                "ignore_eos": False,
                "stop": ["zz", stop_string],
                "stop_token_ids": [token_ids[-1]],
                "max_tokens": NUM_OUTPUT - 1,
            }
        case _:
            min_tokens = 1 + position // 2
            return {"ignore_eos": False, "stop_token_ids": [stop_id], "min_tokens": min_tokens}


def nearest_first(items: Sequence[object], position: int) -> int:
    """The index nearest to `position` of an item that does not occur before."""
    firsts = [index for index, item in enumerate(items) if items.index(item) == index]
    return min(firsts, key=lambda index: abs(index - position))


def run_requests(llm: LLM, requests: Sequence[TracedRequest]) -> list[RequestOutput]:
    """All of them at once, as one call."""
    return llm.generate(
        [request.prompt for request in requests], [request.params for request in requests]
    )


def list_outcomes(outputs: Sequence[RequestOutput]) -> list[Outcome]:
    """One outcome per completion, in order."""
    return [outcome(output, choice) for output in outputs for choice in output.outputs]


def outcome(output: RequestOutput, choice: CompletionOutput) -> Outcome:
    """What one completion came to."""
    assert choice.error is None
    scores = output.prompt_logprobs
    return Outcome(
        num_prompt=len(output.prompt_token_ids),
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        text=choice.text,
        num_logprobs=None if choice.logprobs is None else len(choice.logprobs),
        num_prompt_logprobs=None if scores is None else len(scores),
    )


def expected_end(
    params: SamplingParams, token_ids: Sequence[int]
) -> tuple[list[int], FinishReason, int | str | None]:
    """Tokens, finish and stop of a request without min_tokens whose unstopped tokens are these."""
    assert params.min_tokens == 0 and params.max_tokens is not None
    for num_tokens, token_id in enumerate(token_ids, start=1):
        tokens = list(token_ids[:num_tokens])
        if token_id in EOS_IDS and not params.ignore_eos:
            return tokens, FinishReason.STOP, None
        if token_id in params.stop_token_ids:
            return tokens, FinishReason.STOP, token_id
        text = "".join(map(token_text, tokens))
        found = [(text.index(s) + len(s), s) for s in params.stop_strings if s in text]
        if found:
            return tokens, FinishReason.STOP, min(found)[1]
        if num_tokens == params.max_tokens:
            return tokens, FinishReason.LENGTH, None
    raise AssertionError("the unstopped tokens are too few")
