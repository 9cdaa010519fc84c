"""S1: `make serve` on a machine that has Python, a compiler and make, and nothing else of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.server.served_process import free_port, serve_process

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone") / "deltaloom"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    assert not (folder / ".venv").exists()
    return folder


def test_make_serve_sets_up_and_answers_twice(clone: Path, tmp_path: Path) -> None:
    """S1: first start installs and compiles, the second does neither. Oracle: arithmetic."""
    for log_name in ("first", "second"):
        port = free_port()
        command = ["make", "serve", f"PORT={port}", f"BASE_PYTHON={sys.executable}"]
        with (
            serve_process(command, port, tmp_path / log_name, cwd=clone) as served,
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused") as client,
        ):
            whole = client.chat.completions.create(
                model="gander-12m", messages=QUESTION, temperature=0
            )
            stream = client.chat.completions.create(
                model="gander-12m", messages=QUESTION, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert whole.choices[0].message.content == "".join(pieces) == "17 + 25 = 42"
    assert "installing" in (tmp_path / "first").read_text()
    assert "installing" not in (tmp_path / "second").read_text()


def test_make_batch_uses_the_same_set_up(clone: Path, tmp_path: Path) -> None:
    """S5: the two commands share one environment. Oracle: arithmetic."""
    lines = tmp_path / "in.jsonl"
    lines.write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
        '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}}\n'
    )
    out = tmp_path / "out.jsonl"
    subprocess.run(["make", "batch", f"IN={lines}", f"OUT={out}"], cwd=clone, check=True)
    assert "17 + 25 = 42" in out.read_text()
