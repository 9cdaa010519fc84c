"""S1, S2, S4: the real server on the embedded model, asked by the official client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.served_process import ServedProcess, free_port, serve_command, serve_process

QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    port = free_port()
    log = tmp_path_factory.mktemp("served") / "log"
    with serve_process(serve_command(port), port, log) as served:
        yield served


@pytest.fixture
def client(served: ServedProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_sum_is_answered_streaming_and_not(client: openai.OpenAI) -> None:
    """S1, S2: the embedded model knows 17 + 25. Oracle: arithmetic."""
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == "17 + 25 = 42"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "17 + 25 = 42"
    assert chunks[-1].usage == whole.usage


def test_concurrent_streams_get_their_own_answers(client: openai.OpenAI) -> None:
    """S2, E2: more requests than slots at once. Oracle: each question asked alone."""
    questions = [f"What is {n} + {n + 3}?" for n in range(2, 12)]

    def ask(question: str) -> str | None:
        answer = client.chat.completions.create(
            model="gander-12m",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=30,
        )
        return answer.choices[0].message.content

    alone = [ask(question) for question in questions]
    together: dict[int, str | None] = {}

    def ask_into(index: int) -> None:
        together[index] = ask(questions[index])

    threads = [threading.Thread(target=ask_into, args=(n,)) for n in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[n] for n in range(len(questions))] == alone
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b'{"messages": [{"role": "user"', "JSON"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [], "model": "gander-12m"}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": true}', "n"),
    ],
)
def test_bad_bodies_are_400_and_the_server_goes_on(
    served: ServedProcess, client: openai.OpenAI, body: bytes, part: str
) -> None:
    """S2: OpenAI's error shape names the field. Oracle: the next request is answered."""
    answer = httpx.post(f"{served.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert part in f"{error['param']} {error['message']}"
    assert client.models.list().data


@pytest.mark.parametrize("prompt", [[0, 8192], [-3], list(range(5000))])
def test_impossible_token_prompts_are_400(client: openai.OpenAI, prompt: list[int]) -> None:
    """S2: ids outside the vocabulary, and a prompt beyond the window."""
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="gander-12m", prompt=prompt, max_tokens=2)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    """S2: what evaluation harnesses send. Oracle: lengths and equal floats."""
    ids = [5000, 17, 300, 42, 8]
    answer = client.completions.create(
        model="gander-12m", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs is not None
    last = logprobs.top_logprobs[-1]
    assert last is not None and logprobs.token_logprobs[-1] == max(last.values())


def test_a_killed_engine_ends_streams_and_the_server(tmp_path: Path) -> None:
    """S4: kill -9 of the engine. Oracle: an error event, a failing /health, exit status 1."""
    port = free_port()
    with serve_process(serve_command(port), port, tmp_path / "log") as served:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 3000, "ignore_eos": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(served.engine_process().pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error"' in rest[-2]
        with contextlib.suppress(httpx.TransportError):  # it may have gone already
            assert httpx.get(f"{served.url}/health").status_code == 503
        assert served.process.wait(timeout=30) == 1


def test_a_drain_finishes_what_is_open_and_answers_503(tmp_path: Path) -> None:
    """S4: SIGTERM in mid-stream. Oracle: /ready 503, the whole stream, exit status 0."""
    port = free_port()
    with serve_process(serve_command(port), port, tmp_path / "log") as served:
        body = {"messages": QUESTION, "stream": True, "max_tokens": 400, "ignore_eos": True}
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            served.process.send_signal(signal.SIGTERM)
            while (ready := httpx.get(f"{served.url}/ready")).status_code == 200:
                pass
            # The stream lasts seconds; a listener that were to close would be closed by now.
            time.sleep(0.7)
            refused = httpx.post(url, json=body)
            rest = [line for line in lines if line]
        assert ready.status_code == refused.status_code == 503
        assert "retry-after" in refused.headers
        assert rest[-1] == "data: [DONE]" and '"error"' not in rest[-2]
        assert served.process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--model-path", "/nowhere"], "--model-path"),
        (["--max-model-len", "100000"], "--max-model-len"),
        (["--page-size", "0"], "--page-size"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(flags: list[str], part: str) -> None:
    """S1: oracle: one line on stderr that names the flag."""
    command = serve_command(free_port(), *flags)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert len(lines) == 1 and part in lines[0], done.stderr
    assert sys.executable not in lines[0]
