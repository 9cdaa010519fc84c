"""The batch command over a stub engine: its results, bad lines and load."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.request import NewRequest
from engine.tokens import Tokenizer
from server.batch.lines import MAX_LINE_BYTES
from server.service.chat import ChatService
from server.service.completions import CompletionService
from server.service.served_model import ServedModel
from tests.server.batch_files import (
    CHAT_URL,
    TEXT_URL,
    BatchFolder,
    by_id,
    chat_line,
    dump,
    read_lines,
    text_line,
    without_names,
)
from tests.server.stub_engine import StubEngine, reply_with


@pytest.fixture
def batch(tmp_path: Path, engine: StubEngine) -> BatchFolder:
    """An empty folder and the stub engine."""
    return BatchFolder(tmp_path, engine)


def error_of(result: dict[str, Any]) -> dict[str, Any]:
    """The error in a failed result, which stands there twice."""
    error = result["response"]["body"]["error"]
    assert result["error"] == {
        "code": error["code"] or error["type"],
        "message": error["message"],
    }
    return dict(error)


async def serve_line(model: ServedModel, line: dict[str, Any]) -> dict[str, Any]:
    """What the endpoint's service answers by itself."""
    service = ChatService(model) if line["url"] == CHAT_URL else CompletionService(model)
    return dict(msgspec.to_builtins(await service.create(line["body"])))


def test_results_are_the_services(batch: BatchFolder, model: ServedModel) -> None:
    """S5: facts 1.11, the shape of a line and the body. Oracle: the service called directly."""
    lines = [
        chat_line("chat"),
        chat_line("two", n=2, seed=5, model="gander-12m"),
        chat_line("logs", logprobs=True, top_logprobs=2, max_completion_tokens=3),
        text_line("text", stop=[" is"], stream=False),
        text_line("echo", echo=True, logprobs=1, max_tokens=2),
        text_line("many", prompt=["a", "b", "c"]),
    ]
    batch.write(*lines)
    assert batch.run() == 0
    results = by_id(batch.output)
    assert set(results) == {line["custom_id"] for line in lines}
    for line in lines:
        result = results[line["custom_id"]]
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert result["id"].startswith("batch_req_")
        assert result["error"] is None
        response = result["response"]
        assert response["status_code"] == 200
        assert response["request_id"].startswith("req_")
        expected = asyncio.run(serve_line(model, line))
        assert without_names(response["body"]) == without_names(expected)
    assert len({result["id"] for result in results.values()}) == len(lines)
    assert batch.engine.is_closed


@pytest.mark.parametrize(
    ("line", "custom_id", "said"),
    [
        (b"{", None, "JSON"),
        (b'"text"', None, "JSON object"),
        (b'{"custom_id": "x", "custom_id": "y"}', None, "twice"),
        (b'{"custom_id": "\\ud800"}', None, "JSON"),
        (b"\xff\xfe", None, "JSON"),
        (b"[" * 100_000, None, "JSON"),
        ({"url": TEXT_URL, "body": {"prompt": "a"}}, None, "custom_id"),
        (text_line("x") | {"custom_id": 7}, None, "custom_id"),
        (text_line("x") | {"custom_id": ""}, None, "custom_id"),
        (text_line("x") | {"custom_id": "i" * 513}, None, "custom_id"),
        (text_line("x") | {"method": "GET"}, "x", "method"),
        (text_line("x") | {"url": "/v1/embeddings"}, "x", "/v1/chat/completions"),
        (text_line("x") | {"url": ["/v1/completions"]}, "x", "url"),
        (text_line("x") | {"body": None}, "x", "body"),
        (text_line("x", stream=True), "x", "stream"),
        (text_line("x", temperature="hot"), "x", "temperature"),
        (text_line("x", prompt=[9999]), "x", "9999"),
        (chat_line("x", messages=[]), "x", "messages"),
        (chat_line("x", tools=[{"type": "function"}]), "x", "tools"),
    ],
)
def test_a_bad_line_fails_alone(
    batch: BatchFolder, line: object, custom_id: str | None, said: str
) -> None:
    """S5: one error line with status 400, said twice, and the other lines succeed."""
    batch.write(text_line("before"), line, text_line("after"))
    assert batch.run() == 1
    results = by_id(batch.output)
    assert set(results) == {"before", custom_id, "after"}
    assert results["before"]["error"] is None
    assert results["after"]["error"] is None
    assert results[custom_id]["response"]["status_code"] == 400
    assert said in error_of(results[custom_id])["message"]


def test_unknown_model_is_the_endpoints_404(batch: BatchFolder) -> None:
    """S5: a failure of the request keeps the status that HTTP would have."""
    batch.write(chat_line("x", model="gpt-9"))
    assert batch.run() == 1
    (result,) = read_lines(batch.output)
    assert result["response"]["status_code"] == 404
    assert error_of(result)["code"] == "model_not_found"


def test_a_repeated_custom_id_is_an_error(batch: BatchFolder) -> None:
    """S5: the first line with an id has its result, each further one is a 400."""
    batch.write(text_line("x", max_tokens=1), text_line("x"), text_line("x"))
    assert batch.run() == 1
    results = read_lines(batch.output)
    assert [result["custom_id"] for result in results] == ["x"] * 3
    statuses = sorted(result["response"]["status_code"] for result in results)
    assert statuses == [200, 400, 400]
    assert len({result["id"] for result in results}) == 3


def test_bom_crlf_and_blank_lines(batch: BatchFolder) -> None:
    """S5: facts 1.11, these are no reason to fail."""
    lines = [b"\xef\xbb\xbf" + dump(text_line("a")), b"", b"  \t", dump(chat_line("b")), b""]
    batch.input.write_bytes(b"\r\n".join(lines) + dump(text_line("c")))
    assert batch.run() == 0
    assert set(by_id(batch.output)) == {"a", "b", "c"}


def test_an_overlong_line_fails_alone(batch: BatchFolder) -> None:
    """S5: untrusted sizes are bounded; the rest of the line is not taken for another one."""
    batch.write(text_line("x", user="u" * MAX_LINE_BYTES), text_line("after"))
    assert batch.run() == 1
    results = by_id(batch.output)
    assert str(MAX_LINE_BYTES) in error_of(results[None])["message"]
    assert results["after"]["error"] is None
    assert len(results) == 2


def test_an_empty_file_has_no_results(batch: BatchFolder) -> None:
    """S5: nothing to do is no failure."""
    batch.write()
    assert batch.run() == 0
    assert batch.output.read_bytes() == b""


def test_lines_in_flight_are_bounded(batch: BatchFolder, tokenizer: Tokenizer) -> None:
    """S5: memory does not grow with the file; one line's prompts do not flood the queue.

    Oracle: the largest number of requests that were open in the engine at once.
    """
    engine = CountingEngine(tokenizer, reply_with(tokenizer, "ok"))
    batch.engine = engine
    batch.write(
        *(text_line(f"line {i}") for i in range(200)),
        text_line("many", prompt=["p"] * 300, max_tokens=1),
    )
    assert batch.run() == 0
    assert len(read_lines(batch.output)) == 201
    assert 8 < engine.most_open <= 8 + 16


class CountingEngine(StubEngine):
    """Remembers how many requests were open together."""

    num_open: int = 0
    most_open: int = 0

    async def generate(self, request: NewRequest) -> Any:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            async for update in super().generate(request):
                yield update
        finally:
            self.num_open -= 1


def test_results_are_written_as_they_finish(batch: BatchFolder, tokenizer: Tokenizer) -> None:
    """S5: a result is in the file before a slower request ends. Oracle: the file, meanwhile."""
    seen: list[set[str | None]] = []

    class Watching(StubEngine):
        async def generate(self, request: NewRequest) -> Any:
            is_slow = request.params.max_tokens == 7
            async with asyncio.timeout(10):
                while is_slow and not by_id(batch.output):
                    await asyncio.sleep(0.001)
            if is_slow:
                seen.append(set(by_id(batch.output)))
            async for update in super().generate(request):
                yield update

    batch.engine = Watching(tokenizer, reply_with(tokenizer, "ok"))
    batch.write(text_line("slow", max_tokens=7), text_line("fast"))
    assert batch.run() == 0
    assert seen == [{"fast"}]
    assert [line["custom_id"] for line in read_lines(batch.output)] == ["fast", "slow"]


def test_a_bug_fails_one_line(
    batch: BatchFolder, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """S4, S5: an unexpected exception is a 500 of its line, with a traceback in the log."""
    engine = batch.engine
    answer = engine.reply

    def reply(request: NewRequest) -> Any:
        if request.params.max_tokens == 3:
            raise KeyError("secret")
        return answer(request)

    engine.reply = reply
    batch.write(text_line("a"), text_line("bug", max_tokens=3), text_line("b"))
    assert batch.run() == 1
    results = by_id(batch.output)
    assert results["bug"]["response"]["status_code"] == 500
    assert "secret" not in str(results["bug"])
    assert "KeyError" in caplog.text
    assert len(results) == 3


def test_progress_goes_to_stderr(
    batch: BatchFolder, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """S5: the bar shows lines, tokens per second and failures; without it stderr is quiet.

    The log has the totals. Oracle: the usage in the results.
    """
    caplog.set_level(logging.INFO)
    batch.write(text_line("a"), b"bad", text_line("b", max_tokens=2))
    assert batch.run(has_progress=True) == 1
    results = by_id(batch.output)
    usages = [results[name]["response"]["body"]["usage"] for name in "ab"]
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert f"3 lines run, 0 done before, 1 failed in all; {num_tokens} tokens" in caplog.text
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.rstrip().rpartition("\r")[2]
    assert "3/3" in last
    assert "tokens/s" in last
    assert "1 failed" in last
    batch.output.unlink()
    assert batch.run() == 1
    assert capsys.readouterr().err == ""
