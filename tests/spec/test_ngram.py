"""V18, C-P5: prompt lookup drafts what a scan of the whole history would, without the scan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.spec_protocol import SpecSettings
from spec.ngram.proposer import NgramProposer
from tests.spec.targets import TARGET, play, request_for, settings_for

# Of the matches that are looked for by default.
MATCH_LENGTHS = (8, 4, 2, 1)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ngram(num_drafts: int = 3) -> NgramProposer:
    return NgramProposer(settings_for("ngram", num_drafts), TARGET)


def scan(
    history: Sequence[int], max_drafts: int, match_lengths: Sequence[int] = MATCH_LENGTHS
) -> list[int]:
    """The drafts, found by comparing the last tokens with every place of the history."""
    for length in match_lengths:
        last = history[len(history) - length :]
        for place in range(len(history) - 1, length - 1, -1):
            if length < len(history) and history[place - length : place] == last:
                grown = list(history)
                for offset in range(max_drafts):
                    grown.append(grown[place + offset])
                return grown[len(history) :]
    return []


@settings(max_examples=300, deadline=None)
@given(prompt=TOKENS, steps=st.lists(TOKENS, max_size=8), max_drafts=st.integers(0, 7))
def test_drafts_are_those_of_a_scan(
    prompt: list[int], steps: list[list[int]], max_drafts: int
) -> None:
    """V18: for any history and any number of tokens a step. Oracle: `scan`."""
    proposer = ngram(7)
    output: list[int] = []
    for step in [[], *steps]:
        output += step
        request = request_for(prompt, output, max_drafts=max_drafts)
        assert proposer.propose([request]) == [scan(prompt + output, max_drafts)]


@pytest.mark.parametrize(
    ("shortest", "longest", "match_lengths"),
    [
        (1, 1, (1,)),
        (3, 3, (3,)),
        (2, 4, (4, 2)),
        (3, 7, (7, 3)),
        (3, 10, (10, 5, 3)),
        (1, 12, (12, 6, 3, 1)),
        (64, 64, (64,)),
    ],
)
@settings(max_examples=50, deadline=None)
@given(prompt=TOKENS, output=TOKENS)
def test_matches_are_as_long_as_was_asked(
    shortest: int,
    longest: int,
    match_lengths: tuple[int, ...],
    prompt: list[int],
    output: list[int],
) -> None:
    """V18, issue 5: from the shortest to the longest, halving. Oracle: `scan` of those lengths."""
    wanted = SpecSettings("ngram", 3, min_match_len=shortest, max_match_len=longest)
    proposer = NgramProposer(wanted, TARGET)
    for known in ([], output):
        drafts = scan([*prompt, *known], 3, match_lengths)
        assert proposer.propose([request_for(prompt, known)]) == [drafts]


def test_the_shortest_match_rules_drafts_out() -> None:
    """V18: a shorter match drafts nothing, a longer one is cut to the longest. Oracle: by hand."""
    prompt = [1, 2, 3, 9, 7, 2, 3, 8, 2, 3]
    for shortest, longest, drafts in (
        (1, 8, [8, 2, 3]),  # the last 2, 3
        (3, 8, []),
        (1, 1, [8, 2, 3]),
    ):
        wanted = SpecSettings("ngram", 3, min_match_len=shortest, max_match_len=longest)
        assert NgramProposer(wanted, TARGET).propose([request_for(prompt)]) == [drafts]
    # 4, 2, 3 was followed by 5, and later 2, 3 alone by 6.
    prompt = [4, 2, 3, 5, 0, 2, 3, 6, 4, 2, 3]
    for longest, first in ((3, 5), (2, 6)):
        wanted = SpecSettings("ngram", 1, max_match_len=longest)
        assert NgramProposer(wanted, TARGET).propose([request_for(prompt, max_drafts=1)]) == [
            [first]
        ]


@settings(max_examples=50, deadline=None)
@given(histories=st.lists(TOKENS, min_size=2, max_size=4), step=TOKENS)
def test_requests_share_nothing(histories: list[list[int]], step: list[int]) -> None:
    """C-S8: also after one of them was preempted and came back. Oracle: `scan`."""
    proposer = ngram()
    outputs: list[list[int]] = [[] for _ in histories]
    for turn in range(3):
        requests = [
            request_for(prompt, output, request_id=str(number))
            for number, (prompt, output) in enumerate(zip(histories, outputs, strict=True))
        ]
        wanted = [
            scan([*prompt, *output], 3) for prompt, output in zip(histories, outputs, strict=True)
        ]
        assert proposer.propose(requests) == wanted
        for output in outputs:
            output += step
        proposer.release(str(turn % 2))


def test_a_released_request_leaves_nothing() -> None:
    """C-L2: another request may take the id. Oracle: a new proposer's drafts."""
    proposer = ngram()
    proposer.propose([request_for([1, 2, 3, 4, 1, 2])])
    proposer.release("a")
    proposer.release("a")
    other = request_for([9, 1, 2])
    assert proposer.propose([other]) == ngram().propose([other]) == [[]]


def test_a_loop_is_drafted_on() -> None:
    """V18: drafts do not end with the history. Oracle: the loop, by hand."""
    proposer = ngram(7)
    assert proposer.propose([request_for([6, 6], max_drafts=7)]) == [[6] * 7]
    looping = request_for([1, 2, 3], [1, 2, 3, 1], max_drafts=7, request_id="b")
    assert proposer.propose([looping]) == [[2, 3, 1, 2, 3, 1, 2]]


def test_longer_matches_win_among_near_duplicates() -> None:
    """C-P5: arguments that differ in one place are told apart by what stands before them.

    The call is <arg name="path">FILE</arg><arg name="mode">MODE</arg>, for two files that have a
    different mode. Oracle: the tokens that followed the same file, by hand; the last call, which
    a short match finds, has the other mode.
    """
    path, mode, close, open_a, open_b, read, write = 10, 20, 30, 41, 42, 51, 52
    first = [path, open_a, close, mode, read, close]
    second = [path, open_b, close, mode, write, close]
    prompt = first + second
    proposer = ngram()
    assert proposer.propose([request_for(prompt, [path, open_a, close, mode])]) == [
        [read, close, path]
    ]
    ambiguous = request_for(prompt, [close, mode], request_id="b")
    assert proposer.propose([ambiguous]) == [[write, close, close]]


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_near_duplicates_change_no_output(num_drafts: int) -> None:
    """C-P5: a target that rewrites calls with one argument changed says what it says alone.

    Oracle: the target's tokens, and the fewest steps by hand: each of a call's two changed
    arguments ends a run of drafts, and a token that was never there before has none.
    """
    prompt = [
        token for call in range(6) for token in (1, 2, 3, 100 + call, 4, 5, 6, 7, 200 + call, 8)
    ]
    target = [token if token < 200 else token + 50 for token in prompt]
    output, accepted = play(ngram(num_drafts), prompt, target, num_drafts)
    assert output == target
    runs = (4, 5, 1)  # up to the first argument, up to the second, and the token after it
    assert len(accepted) <= 6 * sum(ceil(run / (num_drafts + 1)) for run in runs)


def test_a_draft_model_is_refused() -> None:
    """C-L7: ngram has none. Oracle: the message, which names the flag and the way out."""
    with pytest.raises(ValueError, match=r"^--speculative-draft-model-path .*x: ngram .* leave"):
        NgramProposer(settings_for("ngram", 3, Path("/models/x")), TARGET)


class CountedTokens(Sequence[int]):
    """Tokens that count how many of them are read."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_reads = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        found = self.token_ids[place]
        self.num_reads += len(found) if isinstance(found, list) else 1
        return found


def work_of_a_step(num_prompt: int) -> tuple[int, int]:
    """Lines that run, and tokens that are read, in a step after a prompt of this length."""
    prompt = CountedTokens([place % 37 for place in range(num_prompt)])
    output = CountedTokens([(num_prompt + place) % 37 for place in range(5)])
    proposer = ngram()
    proposer.propose([request_for(prompt, output)])
    num_lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    prompt.num_reads = output.num_reads = 0
    output.token_ids += [(num_prompt + place) % 37 for place in range(5, 8)]
    before = sys.gettrace()
    sys.settrace(count)
    try:
        proposer.propose([request_for(prompt, output)])
    finally:
        sys.settrace(before)
    return num_lines, prompt.num_reads + output.num_reads


def test_a_step_costs_the_same_after_any_history() -> None:
    """V18: no scan of the history. Oracle: lines run and tokens read after a tenth of it."""
    num_lines, num_reads = work_of_a_step(370)
    assert work_of_a_step(3700) == (num_lines, num_reads)
    assert num_reads <= 3 + 3  # the committed tokens, and those that are drafted
    assert num_lines <= 40 * len(MATCH_LENGTHS)
