"""Runs with drafts beside the greedy run: equal, but for near ties that are proven to be ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import LLM, SamplingParams
from engine.llm import CompletionOutput
from engine.request import MAX_TOP_LOGPROBS, TokenLogprob

Prompt = Sequence[int]
# Differences of logits are measured as differences of log-probabilities of the likeliest tokens.
NUM_TOP = MAX_TOP_LOGPROBS


@dataclass(frozen=True)
class Comparison:
    """How many tokens were compared, and how many of them were near ties."""

    num_tokens: int
    num_near_ties: int


def greedy_params(num_tokens: int) -> SamplingParams:
    """Greedy, to a fixed length, with what proves a near tie."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=NUM_TOP)


def penalised_params(num_tokens: int) -> SamplingParams:
    """Greedy under penalties, which count every committed token."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        frequency_penalty=0.7,
        presence_penalty=0.5,
        repetition_penalty=1.2,
    )


def make_prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """A prompt of each length, no two alike."""
    return [
        [(index * 37 + place * place * 5 + place * 3 + 1) % vocab for place in range(length)]
        for index, length in enumerate(lengths)
    ]


def greedy_run(llm: LLM, prompts: Sequence[Prompt], num_tokens: int) -> list[CompletionOutput]:
    """What plain decoding, or any other engine, makes of the prompts."""
    outputs = llm.generate([list(prompt) for prompt in prompts], greedy_params(num_tokens))
    return [output.outputs[0] for output in outputs]


def penalised_run(llm: LLM, prompts: Sequence[Prompt], num_tokens: int) -> list[list[int]]:
    """Tokens of the prompts under penalties."""
    outputs = llm.generate([list(prompt) for prompt in prompts], penalised_params(num_tokens))
    return [output.outputs[0].token_ids for output in outputs]


def write_script(
    file: Path, prompts: Sequence[Prompt], outputs: Sequence[CompletionOutput]
) -> Path:
    """The file from which `stub` drafts these outputs."""
    lines = [
        json.dumps({"prompt_token_ids": list(prompt), "output_token_ids": output.token_ids})
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    file.write_text("\n".join(lines))
    return file


def compare(llm: LLM, prompts: Sequence[Prompt], greedy: Sequence[CompletionOutput]) -> Comparison:
    """Assert that `llm` gives the greedy outputs; after a near tie it is given the greedy token.

    The outputs have at least 50 distinct tokens together: equal ones would prove little.
    """
    num_tokens = len(greedy[0].token_ids)
    assert len({token for output in greedy for token in output.token_ids}) >= 50
    others = greedy_run(llm, prompts, num_tokens)
    num_near_ties = 0
    for prompt, expected, other in zip(prompts, greedy, others, strict=True):
        start, seen = 0, other
        while (place := first_difference(expected.token_ids[start:], seen.token_ids)) is not None:
            assert expected.logprobs is not None and seen.logprobs is not None
            prove_near_tie(expected.logprobs[start + place], seen.logprobs[place])
            num_near_ties += 1
            start += place + 1
            if start == num_tokens:
                break
            forced = [*prompt, *expected.token_ids[:start]]
            (seen,) = greedy_run(llm, [forced], num_tokens - start)
    return Comparison(num_tokens * len(prompts), num_near_ties)


def first_difference(expected: Sequence[int], seen: Sequence[int]) -> int | None:
    """The first place where the lists differ; they are of one length."""
    assert len(expected) == len(seen)
    differing = (
        place
        for place, (left, right) in enumerate(zip(expected, seen, strict=True))
        if left != right
    )
    return next(differing, None)


def prove_near_tie(expected: TokenLogprob, seen: TokenLogprob) -> None:
    """Assert that the two best tokens are nearer than twice the difference of both paths."""
    left, right = dict(expected.top), dict(seen.top)
    shared = left.keys() & right.keys()
    assert seen.token_id in shared and expected.token_id in shared, "not among the likeliest"
    difference = max(abs(left[token] - right[token]) for token in shared)
    margin = expected.top[0][1] - expected.top[1][1]
    assert margin < 2 * difference, (
        f"not a near tie: {expected.token_id} became {seen.token_id} at a margin of {margin:.3g}, "
        f"while logits differ by {difference:.3g}"
    )
