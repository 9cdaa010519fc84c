"""C-L2: the accounting of pages and slots, checked in a running engine where that is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.cache.allocator import IndexAllocator
from engine.client import EngineDeadError
from engine.config import EngineConfig
from engine.plan import check_assertions
from engine.scheduler import Scheduler
from tests.engine.request_trace import save_checkpoint

PROMPT = [1, 2, 3]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def start(folder: Path, **options: object) -> LLM:
    save_checkpoint("qwen3_5_text", folder)
    settings: dict[str, object] = {
        "device": "cpu",
        "compile": "off",
        "max_running_requests": 2,
        "max_kv_tokens": 64,
        "page_size": 8,
        "num_threads": 1,
    }
    return LLM(str(folder), **(settings | options))  # type: ignore[arg-type]


def lose_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the first of the indices that a request returns is nobody's."""
    give_back = IndexAllocator.give_back

    def forget_one(pool: IndexAllocator, indices: Iterable[int]) -> None:
        give_back(pool, list(indices)[1:])

    monkeypatch.setattr(IndexAllocator, "give_back", forget_one)


@pytest.mark.parametrize("algorithm", [None, "ngram"])
def test_a_lost_page_ends_the_engine(
    algorithm: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C-L2: the next request is refused, and the log says why. Oracle: the error, the words."""
    with start(tmp_path, check_integrity="on", speculative_algorithm=algorithm) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        lose_an_index(monkeypatch)
        assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected
        with pytest.raises(EngineDeadError, match="the engine has failed: AssertionError"):
            llm.generate(PROMPT, PARAMS)
    assert "KV pages: an index is lost" in caplog.text


def test_nothing_is_checked_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-L2: it costs a walk over all pages. Oracle: no call, and outputs as before the fault."""
    with start(tmp_path) as llm:
        expected = llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
        lose_an_index(monkeypatch)
        calls: list[Scheduler] = []
        monkeypatch.setattr(Scheduler, "check_integrity", calls.append)
        for _ in range(2):
            assert llm.generate(PROMPT, PARAMS)[0].outputs[0].token_ids == expected
    assert not calls


def test_checks_that_python_leaves_out_are_refused() -> None:
    """C-L2, C-L7: python -O has no assertions. Oracle: the line that names the flag."""
    wanted = EngineConfig(check_integrity="on")
    check_assertions(wanted, has_assertions=True)
    check_assertions(EngineConfig(), has_assertions=False)
    with pytest.raises(ValueError, match=r"^--check-integrity on .* without -O, or use off$"):
        check_assertions(wanted, has_assertions=False)
