"""Tokenizing and its reverse, by the same rules as the generating endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.errors import BadRequestError
from server.service.prompts import encode_chat, encode_texts, require_tokenizer
from server.service.request_schema import DetokenizeRequest, TokenizeRequest
from server.service.response_schema import DetokenizeResponse, TokenizeResponse
from server.service.served_model import ServedModel

MAX_DETOKENIZED = 1 << 20
DEFAULT_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


class TokenizeService:
    """Answers tokenizer requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def tokenize(self, body: Mapping[str, Any]) -> TokenizeResponse:
        """Token ids of a prompt or of chat messages.

        Raises:
            ApiError: the request is refused.
        """
        model = self._model
        fields = model.reader.read(body, TokenizeRequest)
        model.name_for(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise BadRequestError("Give either prompt or messages.", "prompt")
        if fields.messages is not None:
            ids = await encode_chat(model.front_end, fields)
        else:
            tokenizer = require_tokenizer(model.front_end, "prompt")
            [ids] = await encode_texts(
                tokenizer,
                [fields.prompt or ""],
                add_special_tokens=fields.add_special_tokens,
            )
        tokenizer = require_tokenizer(model.front_end, "prompt")
        return TokenizeResponse(
            count=len(ids),
            max_model_len=model.client.info.limits.max_request_tokens,
            tokens=ids,
            token_strs=(
                [tokenizer.token_string(token_id) for token_id in ids]
                if fields.return_token_strs
                else None
            ),
        )

    def detokenize(self, body: Mapping[str, Any]) -> DetokenizeResponse:
        """The text of token ids, control tokens included.

        Raises:
            ApiError: the request is refused.
        """
        model = self._model
        fields = model.reader.read(body, DetokenizeRequest)
        model.name_for(fields.model)
        tokenizer = require_tokenizer(model.front_end, "tokens")
        if len(fields.tokens) > MAX_DETOKENIZED:
            raise BadRequestError(f"tokens must be at most {MAX_DETOKENIZED} ids.", "tokens")
        vocab_size = model.client.info.limits.vocab_size
        for token_id in fields.tokens:
            if not 0 <= token_id < vocab_size:
                raise BadRequestError(
                    f"tokens: token id {token_id} is outside the vocabulary "
                    f"(0 to {vocab_size - 1}).",
                    "tokens",
                )
        return DetokenizeResponse(tokenizer.decode(fields.tokens, skip_special_tokens=False))

    def tokenizer_info(self) -> dict[str, Any]:
        """The checkpoint's tokenizer_config.json and chat template.

        Raises:
            ApiError: the checkpoint has no tokenizer.
        """
        front_end = self._model.front_end
        require_tokenizer(front_end, "tokenizer_info")
        return {"tokenizer_class": DEFAULT_TOKENIZER_CLASS} | front_end.tokenizer_config
