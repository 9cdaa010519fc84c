"""The offline API: prompts in, finished outputs back, no server."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from engine.chat.templates import ChatTemplate
from engine.client import EngineStats
from engine.config import EngineConfig
from engine.engine import Engine
from engine.local_client import LocalClient
from engine.output_text import OutputText
from engine.prompts import Messages, Prompt, list_conversations, list_prompts
from engine.request import (
    FinishReason,
    NewRequest,
    RequestUpdate,
    SamplingParams,
    TokenLogprob,
    check_request,
    score_prompt_once,
    split_choices,
)
from engine.start import start_engine
from engine.tokens import Tokenizer, load_tokenizer

T = TypeVar("T")


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt. `text` is "" without a tokenizer.

    `num_drafted` and `num_accepted`: drafts that were scored, and that became tokens.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprob] | None
    error: str | None
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its n completions. `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]


@dataclass
class _Collected:
    """What the updates of one request add up to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    last: RequestUpdate | None = None


class LLM:
    """A model in this process, driven by an engine on a thread of its own.

    Every keyword is the engine option of the same name (see `EngineConfig`). Calls block until
    all outputs are finished and may come from any thread, also from one that runs an event
    loop. Use `close`, or a `with` block, to give the memory back.

    Raises:
        ValueError: an option or the checkpoint is unusable.
    """

    def __init__(  # noqa: PLR0913  (one keyword per engine option)
        self,
        model_path: str,
        *,
        load_format: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        device: str = "auto",
        num_threads: int | None = None,
        compile: str = "auto",
        cuda_graphs: str = "auto",
        compile_cache: str | None = None,
        attention_backend: str = "auto",
        check_integrity: str = "off",
        tensor_parallel_size: int = 1,
        state_dtype: str = "float32",
        page_size: int = 64,
        max_kv_tokens: int | None = None,
        memory_ratio: float | None = None,
        max_running_requests: int = 64,
        max_queued_requests: int = 1024,
        max_prefill_tokens: int | None = None,
        overlap: str = "auto",
        speculative_algorithm: str | None = None,
        speculative_num_steps: int | None = None,
        speculative_draft_model_path: str | None = None,
        speculative_ngram_min_match_window_size: int | None = None,
        speculative_ngram_max_match_window_size: int | None = None,
        synthetic_acceptance: float | None = None,
        seed: int | None = None,
    ) -> None:
        config = EngineConfig(
            model_path=model_path,
            load_format=load_format,
            dtype=dtype,
            max_model_len=max_model_len,
            device=device,
            num_threads=num_threads,
            compile=compile,
            cuda_graphs=cuda_graphs,
            compile_cache=compile_cache,
            attention_backend=attention_backend,
            check_integrity=check_integrity,
            tensor_parallel_size=tensor_parallel_size,
            state_dtype=state_dtype,
            page_size=page_size,
            max_kv_tokens=max_kv_tokens,
            memory_ratio=memory_ratio,
            max_running_requests=max_running_requests,
            max_queued_requests=max_queued_requests,
            max_prefill_tokens=max_prefill_tokens,
            overlap=overlap,
            speculative_algorithm=speculative_algorithm,
            speculative_num_steps=speculative_num_steps,
            speculative_draft_model_path=speculative_draft_model_path,
            speculative_ngram_min_match_window_size=speculative_ngram_min_match_window_size,
            speculative_ngram_max_match_window_size=speculative_ngram_max_match_window_size,
            synthetic_acceptance=synthetic_acceptance,
            seed=seed,
        )
        folder = Path(model_path)
        self.tokenizer: Tokenizer | None = load_tokenizer(folder)
        self._chat_template = ChatTemplate.load(folder)
        self._ids = itertools.count()
        engine = start_engine(config, has_progress=False)
        self._free = asyncio.Semaphore(max_queued_requests)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._client = self._run(connect(engine))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        has_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids); outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each. `has_progress` draws a bar on stderr.

        Raises:
            ValueError: a prompt can never be served; nothing has run then.
            EngineDeadError: the engine failed.
        """
        requests = self._build_requests(prompts, sampling_params)
        return self._run(self._generate_all(requests, has_progress))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        has_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; else as `generate`.

        `messages` are OpenAI's: dicts with role and content. `chat_template_kwargs` reach the
        template, such as {"enable_thinking": False}.

        Raises:
            ValueError: the checkpoint has no tokenizer or chat template, or a message is bad.
        """
        if self.tokenizer is None or self._chat_template is None:
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise ValueError(f"messages: this checkpoint has no {missing}; use generate")
        prompts = [
            self._chat_template.encode_prompt(
                self.tokenizer, conversation, chat_template_kwargs=chat_template_kwargs
            )
            for conversation in list_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, has_progress=has_progress)

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._run(self._client.stats())

    def close(self) -> None:
        """Stop the engine; outputs already returned stay valid."""
        if not self._loop.is_closed():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, work: Coroutine[None, None, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise ValueError("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: cancelling aborts the requests and frees what they hold.
            future.cancel()
            raise

    def _build_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[str | None, NewRequest]]:
        each = list_prompts(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(each)
        else:
            params = list(sampling_params)
        if len(params) != len(each):
            raise ValueError(f"sampling_params: got {len(params)} for {len(each)} prompts")
        requests = []
        for index, (prompt, row_params) in enumerate(zip(each, params, strict=True)):
            text = prompt if isinstance(prompt, str) else None
            request = NewRequest(
                request_id=f"llm-{next(self._ids)}",
                prompt_token_ids=self._token_ids(prompt),
                params=row_params,
            )
            try:
                check_request(request, self._client.info.limits)
            except ValueError as refusal:
                raise type(refusal)(f"prompts[{index}]: {refusal}") from refusal
            if row_params.stop_strings and self.tokenizer is None:
                raise ValueError("stop: this checkpoint has no tokenizer; use stop_token_ids")
            requests.append((text, request))
        return requests

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: give prompts as token ids")
        return self.tokenizer.encode(prompt, parse_special=True, add_special_tokens=True)

    async def _generate_all(
        self, requests: list[tuple[str | None, NewRequest]], has_progress: bool
    ) -> list[RequestOutput]:
        with tqdm(total=len(requests), unit="prompt", disable=not has_progress) as bar:

            async def generate(text: str | None, request: NewRequest) -> RequestOutput:
                output = await self._generate(text, request)
                bar.update()
                return output

            tasks = [asyncio.ensure_future(generate(text, request)) for text, request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _generate(self, text: str | None, request: NewRequest) -> RequestOutput:
        choices = score_prompt_once(split_choices(request))
        collected = await asyncio.gather(*(self._collect(choice) for choice in choices))
        return RequestOutput(
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=collected[0].prompt_logprobs,
            outputs=[self._output(index, request, part) for index, part in enumerate(collected)],
        )

    async def _collect(self, request: NewRequest) -> _Collected:
        collected = _Collected()
        async with self._free:
            async for update in self._client.generate(request):
                collected.token_ids += update.token_ids
                collected.logprobs += update.logprobs or []
                collected.prompt_logprobs = update.prompt_logprobs or collected.prompt_logprobs
                collected.last = update
        return collected

    def _output(self, index: int, request: NewRequest, collected: _Collected) -> CompletionOutput:
        last = collected.last
        assert last is not None and last.finish_reason is not None
        has_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            token_ids=collected.token_ids,
            text=self._text(request, collected),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=collected.logprobs if has_logprobs else None,
            error=last.error,
            num_drafted=last.num_drafted,
            num_accepted=last.num_accepted,
        )

    def _text(self, request: NewRequest, collected: _Collected) -> str:
        if self.tokenizer is None:
            return ""
        stream = self.tokenizer.stream(
            request.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens
        )
        text = OutputText(stream, request.params)
        token_ids = collected.token_ids
        last = collected.last
        assert last is not None
        if last.finish_reason is FinishReason.STOP and not isinstance(last.stop_reason, str):
            # The EOS or stop token that ended the output is no text.
            token_ids = token_ids[:-1]
        pieces = [text.push(token_id) for token_id in token_ids]
        return "".join(pieces) + ("" if text.stop_string is not None else text.finish())


async def connect(engine: Engine) -> LocalClient:
    """A client in the loop that this runs in."""
    return LocalClient(engine)
