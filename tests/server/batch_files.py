"""Batch files, a run of them over a stub engine, and what came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.client import EngineClient
from engine.config import EngineConfig
from server.batch.job import BatchOptions, run_batch
from tests.server.stub_engine import StubEngine

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"


def chat_line(custom_id: str, **fields: object) -> dict[str, Any]:
    """A good line for the chat endpoint, with these extra body fields."""
    body = {"messages": [{"role": "user", "content": f"I am {custom_id}"}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": body}


def text_line(custom_id: str, **fields: object) -> dict[str, Any]:
    """A good line for the text endpoint, with these extra body fields."""
    body = {"prompt": f"I am {custom_id}", **fields}
    return {"custom_id": custom_id, "method": "POST", "url": TEXT_URL, "body": body}


def dump(line: object) -> bytes:
    """One line of a batch file, without its end."""
    return json.dumps(line, ensure_ascii=False).encode()


@dataclass
class BatchFolder:
    """One folder with an input, an output and an error file."""

    folder: Path
    engine: StubEngine
    starts: list[EngineConfig] = field(default_factory=list)

    @property
    def input(self) -> Path:
        return self.folder / "in.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def error_file(self) -> Path:
        return self.folder / "errors.jsonl"

    def write(self, *lines: object) -> None:
        """Make the input: bytes as they are, everything else as JSON."""
        parts = [line if isinstance(line, bytes) else dump(line) for line in lines]
        self.input.write_bytes(b"".join(part + b"\n" for part in parts))

    def options(self, **options: Any) -> BatchOptions:
        """Options for this folder."""
        given = {
            "engine": EngineConfig(model_path=str(EMBEDDED)),
            "names": ("gander-12m",),
            "input": self.input,
            "output": self.output,
        }
        return BatchOptions(**(given | options))

    def run(self, **options: Any) -> int:
        """Run the batch over the stub engine; its exit code."""

        async def start_engine(config: EngineConfig) -> EngineClient:
            self.starts.append(config)
            return self.engine

        return run_batch(self.options(**options), start_engine)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The results in a file; every line is whole."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Results by custom_id, each of which stands there once."""
    lines = read_lines(path)
    results = {line["custom_id"]: line for line in lines}
    assert len(results) == len(lines)
    return results


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    """A response body without what differs from call to call."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def answers(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The comparable bodies of successful results, in the order of their ids."""
    ordered = sorted(results, key=lambda result: str(result["custom_id"]))
    return [without_names(result["response"]["body"]) for result in ordered]
