"""S3: stop strings cut the visible text, the same way wherever it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output_text import OutputText
from engine.request import SamplingParams
from engine.tokens import Tokenizer, load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    tokenizer = load_tokenizer(EMBEDDED)
    assert tokenizer is not None
    return tokenizer


class PieceStream:
    """A TextStream over a list of pieces; None is a token whose character is unfinished."""

    def __init__(self, pieces: Sequence[str | None]) -> None:
        self._pieces = pieces
        self._is_unfinished = False

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            piece = self._pieces[token_id]
            self._is_unfinished = piece is None
            text += piece or ""
        return text

    def flush(self) -> str:
        return "\ufffd" if self._is_unfinished else ""


def run(
    pieces: Sequence[str | None], params: SamplingParams
) -> tuple[list[str], str | None, int, str]:
    """Deltas, stop string, number of tokens used and the final flush."""
    output = OutputText(PieceStream(pieces), params)
    deltas: list[str] = []
    for token_id in range(len(pieces)):
        deltas.append(output.push(token_id))
        if output.stop_string is not None:
            return deltas, output.stop_string, token_id + 1, ""
    return deltas, None, len(pieces), output.finish()


def test_row_23_a_match_over_several_tokens() -> None:
    """S3. Oracle: facts/api.md section 3, row 23: no part of the match is ever sent."""
    deltas, stop, num_tokens, _ = run(["Hi", "\nUs", "er", ": x"], SamplingParams(stop="\nUser:"))
    assert (deltas, stop, num_tokens) == (["Hi", "", "", ""], "\nUser:", 4)


def test_row_24_matches_that_end_together_go_by_list_order() -> None:
    """S3. Oracle: facts/api.md section 3, row 24."""
    pieces = ["xab", "more", "of", "it"]
    assert run(pieces, SamplingParams(stop=["ab", "b"]))[:3] == (["x"], "ab", 1)
    assert run(pieces, SamplingParams(stop=["b", "ab"]))[:3] == (["xa"], "b", 1)


def test_row_25_a_match_that_never_completes_is_flushed() -> None:
    """S3. Oracle: facts/api.md section 3, row 25."""
    deltas, stop, _, rest = run(["a", " <e"], SamplingParams(stop=["<end>"]))
    assert (deltas, stop, rest) == (["a", " "], None, "<e")


def test_row_26_an_unfinished_character_ends_the_text_once() -> None:
    """S3. Oracle: facts/api.md section 3, row 26; U+FFFD of the flush completes no stop."""
    deltas, stop, _, rest = run(["ok", None, None], SamplingParams(stop=["ok\ufffd"]))
    assert ("".join(deltas) + rest, stop) == ("ok\ufffd", None)


def test_the_match_that_ends_first_wins() -> None:
    """S3. Oracle: "bc" ends before the longer, earlier begun "abcd"."""
    assert run(["abcd"], SamplingParams(stop=["abcd", "bc"]))[:2] == (["a"], "bc")


def test_only_a_possible_beginning_is_held_back() -> None:
    """S3. Oracle: held text is the longest suffix that begins a stop string, not a length."""
    deltas, _, _, rest = run(["long text <", "e", "x <en"], SamplingParams(stop=["<end>", "zz"]))
    assert (deltas, rest) == (["long text ", "", "<ex "], "<en")


def test_the_stop_string_can_be_kept() -> None:
    """S3. Oracle: text up to the end of the match, nothing after it."""
    params = SamplingParams(stop=["END"], include_stop_str_in_output=True)
    assert run(["a E", "ND b"], params)[:2] == (["a ", "END"], "END")


def test_min_tokens_defers_the_match_not_its_beginning() -> None:
    """S3. Oracle: a match must end in the token at position min_tokens or later."""
    params = SamplingParams(stop=["ab"], min_tokens=2, max_tokens=9)
    assert run(["ab", "ab", "x", "ab", "y"], params)[:3] == (["ab", "ab", "x", ""], "ab", 4)
    assert run(["xx", "a", "b", "y"], params)[:3] == (["xx", "", ""], "ab", 3)


def test_a_match_may_overlap_one_that_came_too_early() -> None:
    """S3. Oracle: "aba" ends in the second token too, sharing its first letter."""
    params = SamplingParams(stop=["aba"], min_tokens=1)
    assert run(["aba", "ba"], params)[:3] == (["ab", ""], "aba", 2)


def test_push_after_a_match_is_a_bug() -> None:
    """S3. Oracle: an assertion, since the drain must have cut there."""
    output = OutputText(PieceStream(["ab", "c"]), SamplingParams(stop="b"))
    output.push(0)
    with pytest.raises(AssertionError):
        output.push(1)
    with pytest.raises(AssertionError):
        output.finish()


def brute_force(
    pieces: Sequence[str], stops: Sequence[str], min_tokens: int
) -> tuple[str, str, int] | None:
    """(text before the match, stop string, tokens used) by looking at every end in turn."""
    text = ""
    for index, piece in enumerate(pieces):
        for char in piece:
            text += char
            for stop in stops:
                if index >= min_tokens and text.endswith(stop):
                    return text.removesuffix(stop), stop, index + 1
    return None


SMALL_TEXT = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    stops=st.lists(SMALL_TEXT, min_size=1, max_size=4),
    min_tokens=st.integers(0, 4),
    has_stop_in_output=st.booleans(),
)
def test_equals_brute_force(
    pieces: list[str], stops: list[str], min_tokens: int, has_stop_in_output: bool
) -> None:
    """S3. Oracle: a search over every prefix of the text, on an alphabet full of overlaps."""
    params = SamplingParams(
        stop=stops,
        min_tokens=min_tokens,
        max_tokens=99,
        include_stop_str_in_output=has_stop_in_output,
    )
    deltas, stop, num_tokens, rest = run(pieces, params)
    expected = brute_force(pieces, stops, min_tokens)
    text = "".join(deltas) + rest
    if expected is None:
        assert (text, stop) == ("".join(pieces), None)
    else:
        shown = expected[0] + (expected[1] if has_stop_in_output else "")
        assert (text, stop, num_tokens) == (shown, *expected[1:])
    # A second reading of the same tokens gives the same deltas.
    assert run(pieces, params) == (deltas, stop, num_tokens, rest)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="abc", max_size=3), max_size=10),
    stops=st.lists(SMALL_TEXT, min_size=1, max_size=3),
)
def test_holds_back_exactly_the_longest_beginning_of_a_match(
    pieces: list[str], stops: list[str]
) -> None:
    """S3. Oracle: every suffix of the text so far against every proper prefix."""
    output = OutputText(PieceStream(pieces), SamplingParams(stop=stops))
    text = sent = ""
    for token_id, piece in enumerate(pieces):
        sent += output.push(token_id)
        text += piece
        if output.stop_string is not None:
            return
        beginnings = [s[:n] for s in stops for n in range(len(s)) if text.endswith(s[:n])]
        assert sent == text[: len(text) - max(map(len, beginnings))]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 30), length=st.integers(1, 6))
def test_a_part_of_a_real_text_stops_it(
    embedded: Tokenizer, text: str, cut: int, length: int
) -> None:
    """S3. Oracle: str.find on the decoded text; ids of the embedded tokenizer."""
    ids = embedded.encode(text, parse_special=False, add_special_tokens=False)
    whole = embedded.decode(ids, skip_special_tokens=True)
    stop = whole[cut : cut + length]
    if not stop:
        return
    stream = embedded.stream((), skip_special_tokens=True)
    output = OutputText(stream, SamplingParams(stop=stop))
    shown = ""
    for token_id in ids:
        shown += output.push(token_id)
        if output.stop_string is not None:
            break
    assert output.stop_string == stop
    assert shown == whole[: whole.find(stop)]
