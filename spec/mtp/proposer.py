"""Chained drafts of the checkpoint's own layer, made on the device at the start of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.paged import TORCH_PAGED
from engine.cache.pools import KvLayer
from engine.loader import fill_dummy
from engine.model_config import ModelConfig
from engine.spec_protocol import (
    DraftRequest,
    DraftRows,
    DraftSizes,
    DraftTarget,
    SpecSettings,
    VerifyChoice,
)
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import TORCH_KERNELS
from spec.mtp.layer import FIRST_PAIR, MtpLayer, load_layer
from spec.proposer import Proposer, ProposerMemory

DUMMY_SEED = 1


class MtpProposer(Proposer):
    """The pairs of committed tokens are made anew with the target's hidden states, then k drafts.

    Kept of each slot, from one step to the next: the hidden states of the rows of its last verify
    step (or of the last row of its prefill), the tokens that they chose, how many are committed.
    """

    wants_features = True
    drafts_on_device = True

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        """Raises ValueError for a target without the layer, where no folder is named."""
        super().__init__(settings, model)
        path = settings.draft_model_path
        if model.mtp_num_layers == 0 and path is None:
            raise ValueError(
                "--speculative-algorithm mtp: the checkpoint has no such layer "
                "(mtp_num_hidden_layers is 0); name a folder that has mtp.* with "
                "--speculative-draft-model-path, or use ngram"
            )
        if path is not None and not Path(path).is_dir():
            raise ValueError(f"--speculative-draft-model-path {path!r} is not a folder")

    @classmethod
    def memory(cls, settings: SpecSettings, model: ModelConfig) -> ProposerMemory:
        """The layer, its keys and values, and the hidden states that wait for the next step."""
        meta = torch.device("meta")
        nothing = torch.empty(0, device=meta)
        cache = KvLayer(nothing, nothing, FIRST_PAIR)
        layer = MtpLayer(model, cache, TORCH_PAGED, TORCH_KERNELS, torch.float32, meta)
        return ProposerMemory(
            num_weights=sum(parameter.numel() for parameter in layer.parameters()),
            kv_values_per_token=2 * model.num_kv_heads * model.head_dim,
            values_per_slot=(settings.num_drafts + 1) * model.hidden_size,
        )

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts are made by `draft`."""
        raise NotImplementedError

    def capture(self, target: DraftTarget, sizes: DraftSizes) -> None:
        """Load the layer and allocate what it keeps.

        Raises:
            ValueError: the target runs on CUDA, or the checkpoint lacks the layer.
        """
        device, dtype, model = target.device, target.dtype, self.model
        if device.type == "cuda":
            raise ValueError("--speculative-algorithm mtp runs on the CPU only, so far; use ngram")
        pool = 1 + sizes.num_pages, sizes.page_size, model.num_kv_heads, model.head_dim
        keys, values = (torch.zeros(pool, dtype=dtype, device=device) for _ in range(2))
        cache = KvLayer(keys, values, FIRST_PAIR)
        self._layer = MtpLayer(
            model, cache, target.backend, target.model.kernels, dtype, device
        ).eval()
        if target.load_format == "dummy":
            fill_dummy(self._layer.parameters(), DUMMY_SEED)
        else:
            path = self.settings.draft_model_path
            load_layer(self._layer, Path(path) if path else target.model_path, device)
        self._target, self._page_size = target, sizes.page_size
        kept = 1 + sizes.num_slots, self.settings.num_drafts + 1
        self._hidden = torch.zeros(*kept, model.hidden_size, dtype=dtype, device=device)
        self._token_ids = torch.zeros(kept, dtype=torch.int64, device=device)
        self._num_kept = torch.ones(1 + sizes.num_slots, dtype=torch.int64, device=device)

    def take_features(self, hidden: Tensor, inputs: ForwardInputs, slots: Tensor) -> None:
        """Keep a verify step's rows for the next; of a prefill also make the pairs."""
        if inputs.kind is Kind.VERIFY:
            rows = hidden.view(-1, inputs.rows_per_request, hidden.shape[1])
            self._hidden[inputs.state_slots] = rows
            return
        # The hidden state before a row: of the row before, or what an earlier piece has left.
        is_first = torch.cat([slots[:1] >= 0, slots[1:] != slots[:-1]])
        shifted = torch.cat([hidden[:1], hidden[:-1]])
        before = torch.where(is_first[:, None], self._hidden[slots, 0], shifted)
        self._run(inputs.token_ids, before, inputs)
        self._hidden[inputs.state_slots, 0] = hidden[(inputs.row_starts[1:] - 1).clamp_min(0)]
        self._num_kept[inputs.state_slots] = 1

    def take_choice(self, slots: Tensor, choice: VerifyChoice) -> None:
        """Keep which tokens follow the rows, and how many of them are committed."""
        self._token_ids[slots] = choice.sampled.token_ids.view(slots.shape[0], -1)
        self._num_kept[slots] = choice.num_committed

    def draft(self, rows: DraftRows) -> Tensor:
        """The pairs up to the pending token, then a chain of drafts, [R, k] int64."""
        num_drafts = self.settings.num_drafts
        hidden = self._refresh(rows)
        drafts = [self._likeliest(hidden)]
        for index in range(1, num_drafts):
            positions = rows.positions + index
            inputs = self._inputs(
                rows, Kind.DECODE, 1, positions, rows.kv_slots[:, index], positions + 1
            )
            hidden = self._run(drafts[-1], hidden, inputs)
            drafts.append(self._likeliest(hidden))
        return torch.stack(drafts, dim=1)

    def _refresh(self, rows: DraftRows) -> Tensor:
        """Make the pairs of the committed rows; what follows the pending token, [R, hidden].

        The last pair is the pending token's. Where fewer than k + 1 rows are committed, the first
        rows are padding.
        """
        num_rows = self.settings.num_drafts + 1
        offsets = torch.arange(num_rows, device=rows.slots.device)
        positions = rows.positions[:, None] + offsets - (num_rows - 1)
        kept = offsets - (num_rows - self._num_kept[rows.slots])[:, None]
        is_pair, kept = kept >= 0, kept.clamp_min(0)
        token_ids = self._token_ids[rows.slots[:, None], kept]
        is_pending = offsets == num_rows - 1
        token_ids = torch.where(is_pair & ~is_pending, token_ids, rows.token_ids[:, None])
        safe = positions.clamp_min(0)
        pages = rows.page_table.gather(1, safe // self._page_size)
        kv_slots = torch.where(is_pair, pages * self._page_size + safe % self._page_size, 0)
        hidden = self._hidden[rows.slots[:, None], kept]
        inputs = self._inputs(
            rows, Kind.VERIFY, num_rows, safe.flatten(), kv_slots.flatten(), rows.positions + 1
        )
        out = self._run(token_ids.flatten(), hidden.flatten(0, 1), inputs)
        return out.view(-1, num_rows, out.shape[1])[:, -1]

    def _inputs(
        self,
        rows: DraftRows,
        kind: Kind,
        rows_per_request: int,
        positions: Tensor,
        kv_slots: Tensor,
        context_lens: Tensor,
    ) -> ForwardInputs:
        nothing = torch.empty(0, dtype=torch.int64, device=positions.device)
        return ForwardInputs(
            kind=kind,
            token_ids=nothing,
            positions=positions,
            kv_slots=kv_slots,
            page_table=rows.page_table,
            context_lens=context_lens,
            state_slots=rows.slots,
            logit_rows=None,
            row_starts=nothing,
            chunks=nothing.view(0, 2),
            chunk_starts=nothing,
            rows_per_request=rows_per_request,
        )

    def _run(self, token_ids: Tensor, hidden: Tensor, inputs: ForwardInputs) -> Tensor:
        target = self._target
        out: Tensor = self._layer(
            target.model.embedding, token_ids, hidden, inputs, target.forward.block
        )
        return out

    def _likeliest(self, hidden: Tensor) -> Tensor:
        model = self._target.model
        return model.kernels.linear(hidden, model.head).argmax(-1)
