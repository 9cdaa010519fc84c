"""What the endpoints serve from: a checkpoint's front-end files and a running engine.

Nothing in the service modules knows HTTP: they take parsed JSON bodies and give response
structs, so that the batch command can call them as well.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.chat.templates import ChatTemplate
from engine.client import EngineClient
from engine.json_file import read_json_file
from engine.request import NewRequest, SamplingParams, check_request, split_choices
from engine.tokens import Tokenizer, load_tokenizer
from engine.version import __version__
from server.errors import BadRequestError, ModelNotFoundError, refusal
from server.metrics import ServerMetrics
from server.service.generate import ChoiceRunner
from server.service.request_schema import RequestReader
from server.service.response_schema import ModelCard, ModelList
from server.service.sampling import SamplingDefaults, fit_budget, load_sampling_defaults

MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
MAX_CHOICES_PER_CALL = 4096
SYSTEM_FINGERPRINT = f"deltaloom-{__version__}"


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """What the front end reads from a checkpoint folder; parts that are absent are None.

    `tokenizer_config` is its tokenizer_config.json, with the chat template that is in use.
    """

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    defaults: SamplingDefaults
    tokenizer_config: dict[str, Any]


def check_checkpoint(folder: Path) -> None:
    """Refuse a wrong path before an engine process is started for it.

    Raises:
        ValueError: `folder` holds no checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model-path must be a folder with a config.json, got {str(folder)!r}")


def load_front_end(folder: Path) -> FrontEnd:
    """Read tokenizer, chat template and sampling defaults.

    Raises:
        ValueError: a file is there but cannot be used; the message names it.
    """
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        config = read_json_file(path, dict[str, Any], max_bytes=MAX_TOKENIZER_CONFIG_BYTES)
    template = ChatTemplate.load(folder)
    template_path = folder / "chat_template.jinja"
    if template_path.is_file():
        config["chat_template"] = template_path.read_text(encoding="utf-8")
    return FrontEnd(
        tokenizer=load_tokenizer(folder),
        template=template,
        defaults=load_sampling_defaults(folder),
        tokenizer_config=config,
    )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model that answers requests under one or several names; the first is its own."""

    client: EngineClient
    front_end: FrontEnd
    names: tuple[str, ...]
    root: str
    metrics: ServerMetrics
    reader: RequestReader = field(default_factory=RequestReader)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def runner(self) -> ChoiceRunner:
        """Runs choices on this model's engine."""
        return ChoiceRunner(self.client, self.front_end.tokenizer, self.metrics)

    def name_for(self, asked: str | None) -> str:
        """The name to answer with: the one that was asked, else the model's own.

        Raises:
            ModelNotFoundError: the name is not served.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ModelNotFoundError(asked, self.names)
        return asked

    def card(self, name: str) -> ModelCard:
        """The entry of /v1/models for one served name."""
        return ModelCard(
            id=name,
            created=self.created,
            root=self.root,
            max_model_len=self.client.info.limits.max_request_tokens,
        )

    def cards(self) -> ModelList:
        """The body of /v1/models."""
        return ModelList(data=[self.card(name) for name in self.names])


def new_id(prefix: str) -> str:
    """A fresh id such as chatcmpl-0123…"""
    return f"{prefix}-{uuid.uuid4().hex}"


def plan_choices(
    model: ServedModel,
    request_id: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    prompt_field: str,
) -> list[NewRequest]:
    """The engine requests of one call; choice k of prompt i stands at i * n + k.

    Raises:
        BadRequestError: a prompt does not fit, a token id does not exist, too many choices.
    """
    limits = model.client.info.limits
    if len(prompts) * params.n > MAX_CHOICES_PER_CALL:
        raise BadRequestError(
            f"{prompt_field}: prompts times n must be at most {MAX_CHOICES_PER_CALL}.", prompt_field
        )
    if params.stop_strings and model.front_end.tokenizer is None:
        raise BadRequestError("stop needs a tokenizer, and this checkpoint has none.", "stop")
    choices: list[NewRequest] = []
    for index, prompt in enumerate(prompts):
        try:
            request = NewRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                prompt_token_ids=prompt,
                params=fit_budget(params, len(prompt), limits),
            )
            check_request(request, limits)
        except ValueError as error:
            raise refusal(error, prompt_field=prompt_field) from error
        choices += split_choices(request)
    return choices
