"""E4, E10: the offline API on the embedded model."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from engine import LLM, FinishReason, SamplingParams
from engine.config import EngineConfig
from engine.request import ContextLengthError
from tests.conftest import EMBEDDED

STORY = (
    "<|im_start|>user\nTell me a story about a fox named Leo.<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SUM = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_every_engine_option_is_a_keyword() -> None:
    """E10: names and defaults. Oracle: the fields of EngineConfig."""
    parameters = inspect.signature(LLM).parameters
    options = {option.name: option.default for option in fields(EngineConfig)}
    assert list(parameters) == list(options)
    del options["model_path"]
    assert {name: parameters[name].default for name in options} == options


def test_outputs_come_in_the_order_of_prompts(embedded_llm: LLM) -> None:
    """E10: text and token prompts mixed, short answers finish first."""
    tokenizer = embedded_llm.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(SUM, parse_special=True, add_special_tokens=False)
    outputs = embedded_llm.generate([STORY, ids, SUM], GREEDY)
    assert [output.prompt for output in outputs] == [STORY, None, SUM]
    assert outputs[1].prompt_token_ids == outputs[2].prompt_token_ids == ids
    assert outputs[1].outputs[0].text == outputs[2].outputs[0].text == "17 + 25 = 42"
    assert outputs[1].outputs[0].finish_reason is FinishReason.STOP
    assert outputs[0].outputs[0].finish_reason is FinishReason.LENGTH
    assert len(outputs[0].outputs[0].token_ids) == 40


def test_one_prompt_alone_is_accepted(embedded_llm: LLM) -> None:
    """E10: a single text or token list is one prompt. Oracle: the list form."""
    listed = embedded_llm.generate([SUM], GREEDY)
    alone = embedded_llm.generate(SUM, GREEDY)
    by_ids = embedded_llm.generate(listed[0].prompt_token_ids, GREEDY)
    assert len(alone) == len(by_ids) == 1
    assert alone[0].outputs == by_ids[0].outputs == listed[0].outputs


def test_chat_renders_and_answers(embedded_llm: LLM) -> None:
    """E10: one conversation, several, and thinking on. Oracle: the rendered prompt given whole."""
    ask = [{"role": "user", "content": "What is 17 + 25?"}]
    expected = embedded_llm.generate([SUM], GREEDY)[0]
    alone = embedded_llm.chat(ask, GREEDY)
    several = embedded_llm.chat([ask, ask], GREEDY)
    assert len(alone) == 1 and len(several) == 2
    for output in (*alone, *several):
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs == expected.outputs
    thinking = embedded_llm.chat(ask, GREEDY, chat_template_kwargs={"enable_thinking": True})[0]
    assert thinking.prompt_token_ids != expected.prompt_token_ids
    with pytest.raises(ValueError, match="role"):
        embedded_llm.chat([{"content": "hi"}])


def test_sampling_is_a_function_of_the_seed(embedded_llm: LLM) -> None:
    """E4: the same seed alone, in a batch, and as one of n. Oracle: the run alone."""
    seeded = SamplingParams(temperature=1.0, max_tokens=30, seed=11)
    alone = embedded_llm.generate([STORY], seeded)[0].outputs[0].token_ids
    crowd = [SamplingParams(temperature=1.2, max_tokens=25) for _ in range(6)]
    batched = embedded_llm.generate(
        [SUM] * 3 + [STORY] + [SUM] * 3, [*crowd[:3], seeded, *crowd[3:]]
    )
    assert batched[3].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, max_tokens=30, seed=9, n=4)
    choices = embedded_llm.generate([STORY], other)[0].outputs
    assert [choice.index for choice in choices] == [0, 1, 2, 3]
    assert choices[2].token_ids == alone
    assert len({tuple(choice.token_ids) for choice in choices}) == 4


def test_preempted_requests_give_the_same_tokens() -> None:
    """E2, S4: too few pages for all. Oracle: each prompt alone with plenty."""
    prompts = [f"{STORY}{'Once upon a time ' * n}" for n in (1, 4, 8, 12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(
        str(EMBEDDED), compile="off", max_running_requests=4, max_kv_tokens=208, page_size=16
    ) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        assert llm.stats().num_preemptions_total == 0
        together = llm.generate(prompts, params)
        assert llm.stats().num_preemptions_total > 0
    assert [output.outputs[0].token_ids for output in together] == alone


@pytest.mark.parametrize("is_included", [False, True])
def test_stop_string_cuts_text_and_tokens(embedded_llm: LLM, is_included: bool) -> None:
    """E4: the token that completes the stop is the last one. Oracle: the unstopped run."""
    free = embedded_llm.generate([STORY], GREEDY)[0].outputs[0]
    stop = free.text[30:37]
    params = SamplingParams(
        temperature=0, max_tokens=40, stop=stop, include_stop_str_in_output=is_included
    )
    cut = embedded_llm.generate([STORY], params)[0].outputs[0]
    end = free.text.index(stop) + len(stop)
    assert cut.text == free.text[: end if is_included else end - len(stop)]
    assert cut.finish_reason is FinishReason.STOP and cut.stop_reason == stop
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    tokenizer = embedded_llm.tokenizer
    assert tokenizer is not None
    with_last = tokenizer.decode(cut.token_ids, skip_special_tokens=True)
    without_last = tokenizer.decode(cut.token_ids[:-1], skip_special_tokens=True)
    assert stop in with_last and stop not in without_last


def test_stop_token_ids_and_min_tokens(embedded_llm: LLM) -> None:
    """E4: a stop id ends the run and is told; min_tokens keeps it from being chosen before."""
    free = embedded_llm.generate([STORY], GREEDY)[0].outputs[0]
    stop_id = free.token_ids[10]
    first = free.token_ids.index(stop_id)
    stopped = embedded_llm.generate(
        [STORY], SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop_id])
    )[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == stop_id
    late = embedded_llm.generate(
        [STORY],
        SamplingParams(temperature=0, max_tokens=40, min_tokens=20, stop_token_ids=[stop_id]),
    )[0].outputs[0]
    assert len(late.token_ids) > 20 and stop_id not in late.token_ids[:20]


def test_logprobs_of_prompt_and_output(embedded_llm: LLM) -> None:
    """E4: scoring the generated text as a prompt gives the same numbers. Oracle: that."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    output = embedded_llm.generate([STORY], params)[0]
    generated = output.outputs[0]
    assert generated.logprobs is not None
    whole = output.prompt_token_ids + generated.token_ids
    scored = embedded_llm.generate([whole], SamplingParams(max_tokens=0, prompt_logprobs=2))[0]
    assert scored.outputs[0].token_ids == []
    assert scored.outputs[0].finish_reason is FinishReason.LENGTH
    scores = scored.prompt_logprobs
    assert scores is not None and len(scores) == len(whole) and scores[0] is None
    for got, again in zip(generated.logprobs, scores[len(output.prompt_token_ids) :], strict=True):
        assert again is not None and again.token_id == got.token_id
        assert again.logprob == pytest.approx(got.logprob, abs=1e-3)
        assert got.top[0] == (got.token_id, got.logprob)
        assert len(got.top) == len(again.top) == 2
        assert again.top[0][0] == again.token_id


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"prompts\[1\]: prompt must hold at least one token"),
        ([1, 8192], r"prompts\[1\]: prompt: token id 8192 is outside the vocabulary"),
        ([1, -1], r"token id -1 is outside"),
        ([5] * 4096, r"maximum context length is 4096 tokens"),
    ],
)
def test_impossible_prompts_are_refused_before_anything_runs(
    embedded_llm: LLM, prompt: list[int], message: str
) -> None:
    """E2: the message has the numbers. Oracle: the counters do not move."""
    before = embedded_llm.stats()
    with pytest.raises(ValueError, match=message):
        embedded_llm.generate([SUM, prompt], GREEDY)
    assert embedded_llm.stats() == before


def test_a_prompt_longer_than_the_kv_cache_names_the_flags() -> None:
    """E2: refused with both numbers. Oracle: the limits given."""
    with (
        LLM(str(EMBEDDED), compile="off", max_kv_tokens=64, max_running_requests=1) as llm,
        pytest.raises(ContextLengthError, match=r"64 tokens\. However, your prompt has 64 tokens"),
    ):
        llm.generate([[1] * 64], GREEDY)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": 2.5}, "logprobs"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": True}, "n"),
        ({"temperature": None}, "temperature"),
        ({"stop": [5]}, "stop"),
        ({"stop_token_ids": [2.5]}, "stop_token_ids"),
        ({"logit_bias": {3.5: 1.0}}, "logit_bias"),
    ],
)
def test_wrongly_typed_parameters_name_their_field(options: dict[str, object], field: str) -> None:
    """E4: Python checks no types, so the struct does. Oracle: the field's name."""
    with pytest.raises(ValueError, match=field):
        SamplingParams(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [[5, [1, 2]], [[1, 2.5]], [[1, None]]])
def test_mixed_or_mistyped_prompts_are_refused(embedded_llm: LLM, prompts: list[object]) -> None:
    """E10: no prompt is dropped in silence. Oracle: ValueError."""
    with pytest.raises(ValueError, match="prompt"):
        embedded_llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_calls_from_several_threads_share_the_queue() -> None:
    """E2, E10: more calls than the queue holds. Oracle: every call gets all its outputs."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with (
        LLM(
            str(EMBEDDED),
            compile="off",
            max_running_requests=1,
            max_queued_requests=2,
            max_kv_tokens=256,
        ) as llm,
        ThreadPoolExecutor(4) as pool,
    ):
        calls = [pool.submit(llm.generate, [[5, 6, 7]] * 4, params) for _ in range(4)]
        assert [len(call.result()) for call in calls] == [4, 4, 4, 4]


def test_generate_works_inside_a_running_loop(embedded_llm: LLM) -> None:
    """E10: a notebook's cell runs in a loop. Oracle: the call outside."""

    async def cell() -> str:
        return embedded_llm.generate([SUM], GREEDY)[0].outputs[0].text

    assert asyncio.run(cell()) == "17 + 25 = 42"


def test_a_closed_llm_says_so() -> None:
    """E10: using it after close is an error that says what happened."""
    llm = LLM(str(EMBEDDED), compile="off", max_running_requests=1, max_kv_tokens=128)
    llm.close()
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate([SUM])


def test_without_a_tokenizer_ids_work_and_text_is_refused(tmp_path: Path) -> None:
    """E1: text is "", ids are right. Oracle: the run with a tokenizer."""
    for file in EMBEDDED.glob("*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).symlink_to(EMBEDDED / name)
    with LLM(str(tmp_path), compile="off", max_running_requests=2, max_kv_tokens=512) as llm:
        assert llm.tokenizer is None
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate(["hello"])
        with pytest.raises(ValueError, match="stop"):
            llm.generate([[1, 2]], SamplingParams(stop="x"))
        output = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=5))[0]
    assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 5


def test_more_eos_ids_than_the_sampler_masks_are_refused_at_start(tmp_path: Path) -> None:
    """E4: met at start-up, not by the first request. Oracle: ValueError that names the field."""
    for file in EMBEDDED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {list(range(17))}}}')
    with pytest.raises(ValueError, match="eos_token_id has 17 ids"):
        LLM(str(tmp_path), compile="off")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "--dtype must be one of"),
        ("max_running_requests", 0, "--max-running-requests must be in"),
        ("max_model_len", 100_000, "--max-model-len 100000 is beyond"),
        ("memory_ratio", 0.0, "--memory-ratio"),
        ("memory_ratio", 1e-6, "lower --max-running-requests"),
        ("memory_ratio", float("nan"), "--memory-ratio"),
        ("num_threads", 100_000, "--num-threads must be in"),
        ("device", "tpu", "--device must be one of"),
    ],
)
def test_bad_options_are_one_line_that_names_the_flag(
    option: str, value: object, message: str
) -> None:
    """E2: refused at start-up. Oracle: the flag's name in the message."""
    options = {"compile": "off", option: value}
    with pytest.raises(ValueError, match=message) as refusal:
        LLM(str(EMBEDDED), **options)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
