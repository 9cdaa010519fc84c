"""V4, V5, C-L7: draft methods by name and by `module:Class`, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from spec.ngram.proposer import NgramProposer
from spec.proposer import Proposer
from spec.registry import PROPOSERS, find_proposer
from spec.stub.proposer import StubProposer
from tests.spec import third_party

HERE = "tests.spec.third_party"


@pytest.mark.parametrize(
    ("algorithm", "proposer"),
    [
        ("stub", StubProposer),
        ("ngram", NgramProposer),
        (f"{HERE}:SmallestProposer", third_party.SmallestProposer),
    ],
)
def test_the_class_of_a_name(algorithm: str, proposer: type[Proposer]) -> None:
    """V5: names of the house, and a third party's class. Oracle: the classes, imported here."""
    assert find_proposer(algorithm) is proposer


@pytest.mark.parametrize("name", PROPOSERS)
def test_every_registered_name_is_there(name: str) -> None:
    """V18: no name points nowhere. Oracle: it is a proposer's."""
    assert issubclass(find_proposer(name), Proposer)


@pytest.mark.parametrize(
    ("algorithm", "cause"),
    [
        ("", "no such draft method"),
        ("Ngram", "no such draft method"),
        ("eagle", "no such draft method"),
        ("no_such_module_here:A", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (":A", "cannot import ''"),
        (".sibling:A", "cannot import '.sibling'"),
        ("broken_proposer:A", "cannot import 'broken_proposer' (RuntimeError: two lines)"),
        ("misspelt_proposer:A", "cannot import 'misspelt_proposer' (SyntaxError"),
        (f"{HERE}:", f"{HERE} has no class without a name"),
        (f"{HERE}:Absent", f"{HERE} has no Absent"),
        (f"{HERE}:A:B", f"{HERE} has no A:B"),
        (f"{HERE}:Unrelated", "Unrelated is not a subclass of spec.proposer.Proposer"),
        (f"{HERE}:NUMBER", "NUMBER is not a subclass of spec.proposer.Proposer"),
        (f"{HERE}:ForgetfulProposer", "ForgetfulProposer does not define propose"),
        ("spec.proposer:Proposer", "Proposer does not define propose"),
    ],
)
def test_a_wrong_name_is_refused_in_one_line(
    algorithm: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-L7: flag, cause and what is accepted. Oracle: the table."""
    (tmp_path / "broken_proposer.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "misspelt_proposer.py").write_text("class A(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as refusal:
        find_proposer(algorithm)
    message = str(refusal.value)
    assert message.startswith(f"--speculative-algorithm {algorithm}: ")
    assert cause in message
    assert message.endswith(
        "accepted: mtp, ngram, stub, or module:Class of a spec.proposer.Proposer"
    )
    assert "\n" not in message
