"""Where an accepted run ends, at each of its offsets: tokens, reasons, and counts of drafts.

With right drafts the first verify step chooses output tokens 1 to k + 1, offset 0 to k.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.draft_counts import DraftCounts
from engine.output_text import OutputText
from engine.request import FinishReason, SamplingParams
from graphs.inputs import Kind
from tests.engine.device_model import (
    EOS,
    PIECES,
    Faults,
    PieceStream,
    Record,
    ScheduledRun,
    drafts_right_up_to,
    make_scheduler,
    token_at,
)

OFFSETS = [(k, offset) for k in (1, 3, 7) for offset in range(k + 1)]
STOP_ID = 5
E, ND = PIECES.index("jE"), PIECES.index("NDk")
at_each_offset = pytest.mark.parametrize(("num_drafts", "offset"), OFFSETS)


def name_where(is_wanted: Callable[[list[int]], bool], num_tokens: int) -> str:
    """A request id whose first num_tokens output tokens are wanted."""
    for name in (f"n{number}" for number in range(20_000)):
        if is_wanted([token_at(name, index) for index in range(num_tokens)]):
            return name
    raise AssertionError("no such name")


def first_at(index: int, token_id: int) -> str:
    """A request id that chooses a token at an output index, and not before."""
    return name_where(
        lambda tokens: token_id not in tokens[:-1] and tokens[-1] == token_id, index + 1
    )


def has_end(tokens: list[int]) -> bool:
    """Whether END is in their text."""
    return (E, ND) in pairwise(tokens)


def run_alone(
    num_drafts: int,
    name: str,
    asked: SamplingParams,
    *,
    num_prompt: int = 3,
    num_right: int = 7,
    bad_index: int | None = None,
) -> tuple[ScheduledRun, Record]:
    """A request that is over after its prefill and one verify step, checked by `finish`."""
    scheduler = make_scheduler(12, 1, max_prefill=64, num_drafts=num_drafts)
    run = ScheduledRun(scheduler, drafts_right_up_to(num_right))
    record = run.submit(name, num_prompt, asked, Faults(bad_index))
    kinds = []
    while run.open:
        kinds.append(run.step().kind)
    assert kinds == [Kind.PREFILL, Kind.VERIFY]
    run.finish()
    return run, record


def check_counts(run: ScheduledRun, record: Record, num_drafted: int, num_accepted: int) -> None:
    """Of the request's last update and of the engine, after one verify step."""
    assert record.last is not None
    assert (record.last.num_drafted, record.last.num_accepted) == (num_drafted, num_accepted)
    num_positions = run.scheduler.limits.num_drafts
    per_position = [int(position < num_accepted) for position in range(num_positions)]
    assert run.scheduler.draft_counts == DraftCounts(
        int(num_drafted > 0), num_drafted, num_accepted, per_position
    )


def params(
    max_tokens: int | None = 30,
    *,
    min_tokens: int = 0,
    stop: str = "",
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop or [],
        stop_token_ids=list(stop_token_ids),
        ignore_eos=ignore_eos,
        logprobs=2,
    )


def no_eos(num_tokens: int) -> str:
    return name_where(lambda tokens: EOS not in tokens, num_tokens)


@at_each_offset
@pytest.mark.parametrize("is_window", [False, True])
def test_a_length_ends_a_run(num_drafts: int, offset: int, is_window: bool) -> None:
    """V2: max_tokens, and max_model_len. Oracle: by hand; only drafts within it are scored."""
    num_tokens = offset + 2
    longest = make_scheduler(12, 1, num_drafts=num_drafts).limits.max_request_tokens
    run, record = run_alone(
        num_drafts,
        no_eos(num_tokens),
        params(None if is_window else num_tokens),
        num_prompt=longest - num_tokens if is_window else 3,
    )
    assert len(record.token_ids) == len(record.logprobs) == num_tokens
    assert record.outcome.finish_reason is FinishReason.LENGTH
    check_counts(run, record, offset, offset)


@at_each_offset
def test_a_bad_row_ends_a_run(num_drafts: int, offset: int) -> None:
    """S4: the tokens before it stay, none after. Oracle: by hand."""
    run, record = run_alone(num_drafts, no_eos(offset + 1), params(), bad_index=offset + 1)
    assert record.outcome.finish_reason is FinishReason.ERROR
    assert len(record.token_ids) == len(record.logprobs) == offset + 1
    check_counts(run, record, num_drafts, offset)


def ending(kind: str, index: int) -> tuple[str, SamplingParams, int | None]:
    """A request that a token ends at an output index: id, parameters, stop reason."""
    if kind == "stop id":
        return first_at(index, STOP_ID), params(stop_token_ids=(STOP_ID,), ignore_eos=True), STOP_ID
    if kind == "min_tokens":
        name = name_where(lambda tokens: tokens[-2:] == [EOS, EOS], index + 1)
        return name, params(min_tokens=index), None
    return first_at(index, EOS), params(), None


@at_each_offset
@pytest.mark.parametrize("kind", ["eos", "stop id", "min_tokens"])
def test_a_token_ends_a_run(num_drafts: int, offset: int, kind: str) -> None:
    """V2, C-P1: nothing after it; before it min_tokens lets an EOS pass. Oracle: by hand."""
    name, asked, stop_reason = ending(kind, offset + 1)
    _, record = run_alone(num_drafts, name, asked)
    assert len(record.token_ids) == len(record.logprobs) == offset + 2
    assert record.outcome.finish_reason is FinishReason.STOP
    assert record.outcome.stop_reason == stop_reason
    assert record.state.num_state_tokens == record.state.num_tokens - 1


@at_each_offset
@pytest.mark.parametrize("kind", ["eos", "stop id", "min_tokens"])
def test_a_wrong_draft_before_the_end_is_not_accepted(
    num_drafts: int, offset: int, kind: str
) -> None:
    """V2: the token that ends the request replaces a draft. Oracle: by hand."""
    name, asked, stop_reason = ending(kind, offset + 1)
    run, record = run_alone(num_drafts, name, asked, num_right=offset)
    assert len(record.token_ids) == offset + 2
    assert record.outcome.stop_reason == stop_reason
    check_counts(run, record, num_drafts, offset)


@pytest.mark.parametrize("offset", range(3))
@pytest.mark.parametrize("kind", ["eos", "stop id", "min_tokens"])
def test_a_draft_that_ends_the_request_is_accepted(offset: int, kind: str) -> None:
    """V18: `DraftCounts` counts drafts that became part of the output. Oracle: by hand, k = 3."""
    name, asked, _ = ending(kind, offset + 1)
    run, record = run_alone(3, name, asked)
    check_counts(run, record, 3, offset + 1)


def end_at(index: int) -> str:
    """A request id whose text has END first with the token at an output index, and no EOS."""
    return name_where(
        lambda tokens: tokens[-2:] == [E, ND] and EOS not in tokens and not has_end(tokens[:-1]),
        index + 1,
    )


def visible_text(record: Record) -> str:
    """What the HTTP process makes of the delivered tokens: it fails on any after the stop."""
    text = OutputText(PieceStream(), record.state.params)
    return "".join(text.push(token_id) for token_id in record.token_ids)


@at_each_offset
def test_a_stop_string_ends_a_run(num_drafts: int, offset: int) -> None:
    """C-P1: END split over two tokens, max_tokens in the same step. Oracle: by hand."""
    index = offset + 1
    name = end_at(index)
    before = "".join(PIECES[token_at(name, before)] for before in range(index - 1)) + "j"
    for max_tokens in range(index + 1, num_drafts + 3):
        run, record = run_alone(num_drafts, name, params(max_tokens, stop="END"))
        assert record.outcome.finish_reason is FinishReason.STOP
        assert record.outcome.stop_reason == "END"
        assert visible_text(record) == before
        assert len(record.token_ids) == len(record.logprobs) == index + 1
        num_drafted = max_tokens - 2
        check_counts(run, record, num_drafted, min(index, num_drafted))


@pytest.mark.parametrize(("num_drafts", "offset"), [case for case in OFFSETS if case[0] > case[1]])
def test_an_earlier_stop_string_beats_a_later_eos(num_drafts: int, offset: int) -> None:
    """C-P1: both in one accepted run, END first. Oracle: by hand."""
    index = offset + 1
    name = name_where(
        lambda tokens: (
            tokens[-3:] == [E, ND, EOS] and EOS not in tokens[:-1] and not has_end(tokens[:-2])
        ),
        index + 2,
    )
    run, record = run_alone(num_drafts, name, params(stop="END"))
    assert record.outcome.stop_reason == "END"
    assert record.token_ids[-2:] == [E, ND] and len(record.token_ids) == index + 1
    check_counts(run, record, num_drafts, index)


@at_each_offset
def test_an_eos_beats_a_later_stop_string(num_drafts: int, offset: int) -> None:
    """C-P1: the other way round. Oracle: by hand."""
    name = name_where(
        lambda tokens: (
            tokens[-3:] == [EOS, E, ND] and EOS not in tokens[:-3] and not has_end(tokens[:-1])
        ),
        offset + 4,
    )
    _, record = run_alone(num_drafts, name, params(stop="END"))
    assert (record.outcome.finish_reason, record.outcome.stop_reason) == (FinishReason.STOP, None)
    assert record.token_ids[-1] == EOS and len(record.token_ids) == offset + 2


def test_steps_without_drafts_keep_their_rows() -> None:
    """C-S2: k = 3 and usable drafts [k, 0, k, 0, 1, 0], all right. Oracle: counts by hand."""
    pattern = [3, 0, 3, 0, 1, 0]
    scheduler = make_scheduler(30, 1, max_prefill=16, num_drafts=3)
    usable = iter(pattern)
    right = drafts_right_up_to(3)
    run = ScheduledRun(scheduler, lambda name, index, _: right(name, index, next(usable)))
    record = run.submit("a", 6, params(40, ignore_eos=True))
    run.step()
    for num_usable in pattern:
        before = len(record.token_ids)
        batch = run.step()
        assert (batch.kind, batch.num_rows) == (Kind.VERIFY, 4)
        assert len(record.token_ids) - before == num_usable + 1
    assert (record.state.num_drafted, record.state.num_accepted) == (7, 7)


@pytest.mark.parametrize("num_drafts", range(1, 8))
def test_drafts_beyond_the_length_are_not_asked_for(num_drafts: int) -> None:
    """V2: every length of output. Oracle: a step can commit what is left, one of it no draft."""
    for max_tokens in range(2, 2 * num_drafts + 4):
        run = ScheduledRun(make_scheduler(12, 1, num_drafts=num_drafts))
        record = run.submit("a", 3, params(max_tokens, ignore_eos=True))
        run.step()
        while record.last is None:
            num_left = max_tokens - len(record.token_ids)
            batch = run.step()
            assert batch.entries[0].max_drafts == min(num_drafts, num_left - 1)
        assert len(record.token_ids) == max_tokens


def test_totals_by_position() -> None:
    """V18: steps of several lengths. Oracle: by hand."""
    counts = DraftCounts(num_accepted_per_position=[0] * 4)
    for num_drafted, num_accepted in ((3, 2), (0, 0), (1, 1), (4, 0), (3, 3)):
        counts.add(num_drafted, num_accepted)
    assert counts == DraftCounts(4, 11, 6, [3, 2, 1, 0])
