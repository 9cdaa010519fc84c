"""V18: the stub drafts known outputs, wrong where it says it is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spec.stub.proposer import StubProposer
from spec.stub.script import read_script
from tests.spec.targets import TARGET, play, request_for, settings_for

VOCAB = TARGET.vocab_size
OTHER_PROMPT = [4, 4]


def script_line(prompt: list[int], output: list[int]) -> str:
    return json.dumps({"prompt_token_ids": prompt, "output_token_ids": output})


def write_script(folder: Path, *lines: str) -> Path:
    path = folder / "script.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7])
def test_every_accept_count_occurs(num_drafts: int, tmp_path: Path) -> None:
    """V13: step s accepts s mod (k + 1) drafts. Oracle: the count, and the scripted output."""
    output = [5 + place % 90 for place in range(200)] + [VOCAB - 1]
    path = write_script(tmp_path, script_line([1], [9]), "", script_line([1, 2, 3], output))
    proposer = StubProposer(settings_for("stub", num_drafts, path), TARGET)
    said, accepted = play(proposer, [1, 2, 3], output, num_drafts)
    assert said == output
    whole = accepted[: -num_drafts - 1]  # the last steps have less room
    assert whole == [step % (num_drafts + 1) for step in range(len(whole))]
    assert set(whole) == set(range(num_drafts + 1))


def test_a_wrong_draft_is_a_token_and_the_only_one(tmp_path: Path) -> None:
    """V13: drafts behind the wrong one are right. Oracle: the script, by hand."""
    output = [10, 11, VOCAB - 1, 13, 14]
    path = write_script(tmp_path, script_line([1], output))
    proposer = StubProposer(settings_for("stub", 3, path), TARGET)
    request = request_for([1], [10])
    drafts = [proposer.propose([request])[0] for _ in range(5)]
    assert drafts == [
        [12, VOCAB - 1, 13],
        [11, 0, 13],
        [11, VOCAB - 1, 14],
        [11, VOCAB - 1, 13],
        [12, VOCAB - 1, 13],
    ]


def test_requests_move_on_by_themselves(tmp_path: Path) -> None:
    """C-S8: a request's place depends on its own steps, and a release starts it again.

    Oracle: the script, by hand.
    """
    path = write_script(tmp_path, script_line([1], [10, 11, 12]), script_line([2], [20, 21]))
    proposer = StubProposer(settings_for("stub", 1, path), TARGET)
    first = request_for([1], [10], max_drafts=1)
    second = request_for([2], [20], max_drafts=1, request_id="b")
    assert proposer.propose([first]) == [[12]]
    assert proposer.propose([second, first]) == [[22], [11]]
    proposer.release("b")
    assert proposer.propose([first, second]) == [[12], [22]]


def test_no_drafts_after_the_script(tmp_path: Path) -> None:
    """V18: nor more than it has. Oracle: the script, by hand."""
    path = write_script(tmp_path, script_line([1], [10, 11, 12]))
    proposer = StubProposer(settings_for("stub", 3, path), TARGET)
    assert proposer.propose([request_for([1], [10])]) == [[12, 12]]
    assert proposer.propose([request_for([1], [10, 11, 12])]) == [[]]
    assert proposer.propose([request_for([1], [10], max_drafts=0)]) == [[]]


@pytest.mark.parametrize("has_file", [False, True])
def test_unknown_prompts_repeat_the_pending_token(has_file: bool, tmp_path: Path) -> None:
    """V18: with no file, or none for this prompt. Oracle: the last token."""
    path = write_script(tmp_path, script_line([1], [10])) if has_file else None
    proposer = StubProposer(settings_for("stub", 3, path), TARGET)
    assert proposer.propose([request_for(OTHER_PROMPT, [8, 9])]) == [[9, 9, 9]]
    assert proposer.propose([request_for(OTHER_PROMPT, max_drafts=2)]) == [[4, 4]]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["", "{"], ", line 2: "),
        (["[]"], ", line 1: Expected `object`"),
        (['{"prompt_token_ids": [1]}'], ", line 1: Object missing required field"),
        ([script_line([1], [2])[:-1] + ', "more": 1}'], ", line 1: Object contains unknown field"),
        ([script_line([1], [2]), script_line([1], [-2])], ", line 2: Expected `int` >= 0"),
        (['{"prompt_token_ids": [1], "output_token_ids": ["x"]}'], ", line 1: Expected `int`"),
        ([script_line([1], [VOCAB])], f", line 1: a token id is not below {VOCAB}"),
        ([script_line([VOCAB], [1])], f", line 1: a token id is not below {VOCAB}"),
        (
            [script_line([1], [2]), script_line([1], [2]), script_line([1], [3])],
            ", line 3: another output for a prompt seen before",
        ),
    ],
)
def test_a_wrong_line_is_named(lines: list[str], problem: str, tmp_path: Path) -> None:
    """C-L7: flag, file and line. Oracle: the table."""
    path = write_script(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(f"{path}{problem}")) as refusal:
        StubProposer(settings_for("stub", 3, path), TARGET)
    assert str(refusal.value).startswith("--speculative-draft-model-path ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """C-L7: absent, a folder, not text. Oracle: the messages."""
    with pytest.raises(ValueError, match=r"-path .*absent: No such file or directory; a file of"):
        read_script(tmp_path / "absent", VOCAB)
    with pytest.raises(ValueError, match=r"-path .*: Is a directory; a file of JSON lines"):
        read_script(tmp_path, VOCAB)
    path = tmp_path / "binary"
    path.write_bytes(b'{"\xff\xfe\x00": 1}')
    with pytest.raises(ValueError, match=r"-path .*binary, line 1: "):
        read_script(path, VOCAB)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    """V18: a wrong path costs no memory. Oracle: the file's size."""
    path = write_script(tmp_path, script_line([1], [2]))
    size = path.stat().st_size
    assert read_script(path, VOCAB, max_bytes=size) == {(1,): (2,)}
    with pytest.raises(ValueError, match=f"larger than {size - 1} bytes"):
        read_script(path, VOCAB, max_bytes=size - 1)
