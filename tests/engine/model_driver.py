"""Feeds a model without a scheduler: owns its pools and builds its inputs by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.paged import TORCH_PAGED, TRITON_PAGED
from engine.batch import build_chunks
from engine.cache.pools import PADDING_INDEX, CachePools, allocate_pools
from engine.loader import load_weights
from engine.model_config import ModelConfig, load_model_config
from engine.models.build import build_model, plan_weights
from engine.models.hybrid import EAGER, HybridModel
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import TORCH_KERNELS, TRITON_KERNELS

CPU = torch.device("cpu")
PAGE_SIZE = 16
PAGES_PER_REQUEST = 18
MAX_REQUESTS = 4


@dataclass
class DrivenRequest:
    """Tokens so far; the first `num_done` of them are in the caches."""

    slot: int
    pages: list[int]
    token_ids: list[int]
    num_done: int = 0


@dataclass(frozen=True)
class Setting:
    """Where a model runs and on which kernels."""

    device: torch.device = CPU
    is_triton: bool = False
    dtype: torch.dtype = torch.float32


TORCH_ON_CPU = Setting()


def empty_model(
    config: ModelConfig, setting: Setting = TORCH_ON_CPU
) -> tuple[HybridModel, CachePools]:
    """A model, and pools whose every value is NaN until it is written."""
    pools = allocate_pools(
        config,
        num_pages=MAX_REQUESTS * PAGES_PER_REQUEST,
        page_size=PAGE_SIZE,
        num_slots=MAX_REQUESTS,
        dtype=setting.dtype,
        state_dtype=torch.float32,
        device=setting.device,
    )
    for pool in (pools.keys, pools.values, pools.conv, pools.state):
        pool.fill_(torch.nan)
    backend = TRITON_PAGED if setting.is_triton else TORCH_PAGED
    kernels = TRITON_KERNELS if setting.is_triton else TORCH_KERNELS
    return build_model(config, pools, backend, kernels, setting.dtype, setting.device), pools


class ModelDriver:
    """One model and its requests; pages and slots are handed out in a mixed order.

    From a folder it is loaded; from a config its weights are for the caller to fill in.
    """

    def __init__(self, source: Path | ModelConfig, setting: Setting = TORCH_ON_CPU) -> None:
        self.device = setting.device
        is_folder = isinstance(source, Path)
        config = load_model_config(source) if is_folder else source
        self.model, self.pools = empty_model(config, setting)
        if is_folder:
            load_weights(source, partial(plan_weights, self.model), self.device, progress=False)
        generator = torch.Generator().manual_seed(5)
        self.free_pages = (1 + torch.randperm(self.pools.num_pages, generator=generator)).tolist()
        self.free_slots = (1 + torch.randperm(self.pools.num_slots, generator=generator)).tolist()

    def start(self, prompt: Sequence[int]) -> DrivenRequest:
        """A request with all its pages, nothing of it computed yet."""
        pages = [self.free_pages.pop() for _ in range(PAGES_PER_REQUEST)]
        return DrivenRequest(self.free_slots.pop(), pages, list(prompt))

    def finish(self, request: DrivenRequest) -> None:
        """Give pages and slot back, as they are."""
        self.free_pages += request.pages
        self.free_slots.append(request.slot)

    def prefill(self, spans: Sequence[tuple[DrivenRequest, int]]) -> list[Tensor]:
        """The next rows of each request in one forward; logits [rows, vocab] for each."""
        return self._forward(Kind.PREFILL, spans, num_padding=0)

    def decode(self, requests: Sequence[DrivenRequest], num_padding: int = 0) -> list[Tensor]:
        """The next row of each request in one forward; logits [1, vocab] for each."""
        return self._forward(Kind.DECODE, [(request, 1) for request in requests], num_padding)

    def _forward(
        self, kind: Kind, spans: Sequence[tuple[DrivenRequest, int]], num_padding: int
    ) -> list[Tensor]:
        inputs = build_inputs(kind, spans, num_padding, self.device)
        with torch.inference_mode():
            logits = self.model(inputs, EAGER).cpu()
        for request, num_rows in spans:
            request.num_done += num_rows
        return list(logits.split([num_rows for _, num_rows in spans]))


def build_inputs(
    kind: Kind,
    spans: Sequence[tuple[DrivenRequest, int]],
    num_padding: int,
    device: torch.device,
) -> ForwardInputs:
    """The next `num_rows` tokens of each request, then padding rows."""
    token_ids, positions, kv_slots, row_starts = [], [], [], [0]
    for request, num_rows in spans:
        for position in range(request.num_done, request.num_done + num_rows):
            token_ids.append(request.token_ids[position])
            positions.append(position)
            page = request.pages[position // PAGE_SIZE]
            kv_slots.append(page * PAGE_SIZE + position % PAGE_SIZE)
        row_starts.append(row_starts[-1] + num_rows)
    context_lens = [request.num_done + num_rows for request, num_rows in spans]
    num_pages = -(-max(context_lens) // PAGE_SIZE)
    chunks, chunk_starts = build_chunks(row_starts)
    padding, no_pages = [PADDING_INDEX] * num_padding, [PADDING_INDEX] * num_pages

    def on_device(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, device=device)

    return ForwardInputs(
        kind=kind,
        token_ids=on_device(token_ids + padding),
        positions=on_device(positions + padding),
        kv_slots=on_device(kv_slots + padding),
        page_table=on_device(
            [request.pages[:num_pages] for request, _ in spans] + [no_pages] * num_padding
        ),
        context_lens=on_device(context_lens + [1] * num_padding),
        state_slots=on_device([request.slot for request, _ in spans] + padding),
        logit_rows=torch.arange(row_starts[-1], device=device),
        row_starts=on_device(row_starts),
        chunks=on_device(chunks),
        chunk_starts=on_device(chunk_starts),
    )
