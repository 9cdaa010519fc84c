"""An engine by itself as something to measure."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from random import Random

from engine.client import EngineClient, QueueFullError
from engine.request import FinishReason, NewRequest, SamplingParams
from server.bench.load import RequestFailedError, RequestShape, RequestTrace


class EngineTarget:
    """An engine without a server: prompts are random token ids."""

    def __init__(self, client: EngineClient, shape: RequestShape) -> None:
        limits = client.info.limits
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        if num_tokens > limits.max_request_tokens:
            raise ValueError(
                f"--prompt-tokens plus --output-tokens is {num_tokens}, and this engine takes "
                f"{limits.max_request_tokens} tokens per request"
            )
        self._client = client
        self._shape = shape
        self._params = SamplingParams(
            temperature=0.0, max_tokens=shape.num_output_tokens, ignore_eos=shape.ignore_eos
        )

    async def measure(self, random: Random) -> RequestTrace:
        """See `BenchTarget.measure`."""
        vocab_size = self._client.info.limits.vocab_size
        prompt = [random.randrange(vocab_size) for _ in range(self._shape.num_prompt_tokens)]
        request = NewRequest(
            request_id=uuid.uuid4().hex, prompt_token_ids=prompt, params=self._params
        )
        started_s = time.monotonic()
        token_times_s: list[float] = []
        num_tokens = 0
        updates = self._client.generate(request)
        assert isinstance(updates, AsyncGenerator)
        try:
            async with aclosing(updates):
                async for update in updates:
                    if update.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise RequestFailedError(update.error or "the request was aborted")
                    if update.token_ids:
                        token_times_s.append(time.monotonic())
                        num_tokens += len(update.token_ids)
        except QueueFullError as error:
            raise RequestFailedError(f"the engine's queue is full: {error}") from error
        return RequestTrace(
            started_s=started_s,
            first_token_s=token_times_s[0],
            last_token_s=token_times_s[-1],
            num_prompt_tokens=len(prompt),
            num_output_tokens=num_tokens,
        )
