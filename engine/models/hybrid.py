"""A decoder whose layers mix GatedDeltaNet and full attention.

One class serves every family: families differ in tensor names and layouts, which their own
folder maps onto these parameters (see `engine.models.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.attention.protocol import AttentionBackend
from engine.cache.pools import CachePools
from engine.layers.attention import AttentionMixer
from engine.layers.gdn import GdnMixer
from engine.layers.mlp import DenseMlp, MoeMlp
from engine.layers.parameter import empty_weight
from engine.model_config import LayerKind, ModelConfig
from graphs.inputs import ForwardInputs, Kind
from graphs.kernels.kernel_set import KernelSet

BlockForward = Callable[["DecoderBlock", Tensor, Tensor, ForwardInputs], tuple[Tensor, Tensor]]
GroupForward = Callable[
    [Sequence["DecoderBlock"], Tensor, Tensor, ForwardInputs], tuple[Tensor, Tensor]
]
HeadForward = Callable[["HybridModel", Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ForwardFunctions:
    """The regions of a forward, each compiled or as it is: one block, and norm and head.

    `group` (None: no such region): `blocks_per_group` blocks of a decode step of one row at once.
    """

    block: BlockForward
    head: HeadForward
    group: GroupForward | None = None
    blocks_per_group: int = 1


class DecoderBlock(nn.Module):
    """Mixer and feed-forward, each after a norm; the residual stream passes through.

    The residual add that belongs to the previous block happens at the start of this one, so
    that it and the norm after it fall into one compiled region.
    """

    def __init__(
        self,
        config: ModelConfig,
        mixer: GdnMixer | AttentionMixer,
        mlp: DenseMlp | MoeMlp,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.mixer, self.mlp, self.kernels = mixer, mlp, kernels
        self.eps = config.rms_norm_eps
        self.mixer_norm = empty_weight(config.hidden_size, dtype=dtype, device=device)
        self.mlp_norm = empty_weight(config.hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor, residual: Tensor, inputs: ForwardInputs) -> tuple[Tensor, Tensor]:
        """x, residual [T, hidden]: the pending output and the stream it is to be added to."""
        x, residual = self.kernels.add_rms_norm(x, residual, self.mixer_norm, self.eps)
        x = self.mixer(x, inputs)
        x, residual = self.kernels.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(x), residual


class HybridModel(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(
        self,
        config: ModelConfig,
        pools: CachePools,
        backend: AttentionBackend,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        hidden = config.hidden_size
        self.embedding = empty_weight(config.vocab_size, hidden, dtype=dtype, device=device)
        self.blocks = nn.ModuleList()
        num_gdn = num_attention = 0
        for kind, is_moe in zip(config.layer_kinds, config.is_moe, strict=True):
            mixer: GdnMixer | AttentionMixer
            if kind is LayerKind.GDN:
                mixer = GdnMixer(config, pools.gdn_layer(num_gdn), kernels, dtype, device)
                num_gdn += 1
            else:
                cache = pools.kv_layer(num_attention)
                mixer = AttentionMixer(config, cache, backend, kernels, dtype, device)
                num_attention += 1
            mlp = (
                MoeMlp(config, kernels, dtype, device)
                if is_moe
                else DenseMlp(hidden, config.intermediate_size, kernels, dtype, device)
            )
            self.blocks.append(DecoderBlock(config, mixer, mlp, kernels, dtype, device))
        self.norm = empty_weight(hidden, dtype=dtype, device=device)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else empty_weight(config.vocab_size, hidden, dtype=dtype, device=device)
        )

    def forward(self, inputs: ForwardInputs, run: ForwardFunctions) -> Tensor:
        """Logits [N, vocab] of the rows that inputs.logit_rows wants."""
        return self.logits(self.hidden(inputs, run), inputs.logit_rows, run)

    def hidden(self, inputs: ForwardInputs, run: ForwardFunctions) -> tuple[Tensor, Tensor]:
        """The last block's output and the residual stream it is to be added to, [T, hidden]."""
        x = F.embedding(inputs.token_ids, self.embedding)
        residual = torch.zeros_like(x)
        blocks = [block for block in self.blocks if isinstance(block, DecoderBlock)]
        if run.group is not None and inputs.kind is Kind.DECODE and x.shape[0] == 1:
            # Else groups compile once more, for the first width of the page table alone.
            torch._dynamo.maybe_mark_dynamic(inputs.page_table, 1)
            for first in range(0, len(blocks), run.blocks_per_group):
                group = blocks[first : first + run.blocks_per_group]
                x, residual = run.group(group, x, residual, inputs)
            return x, residual
        for block in blocks:
            x, residual = run.block(block, x, residual, inputs)
        return x, residual

    def features(self, hidden: tuple[Tensor, Tensor]) -> Tensor:
        """What `hidden` returned, added up and normed, [T, hidden]; eager."""
        normed, _ = self.kernels.add_rms_norm(*hidden, self.norm, self.config.rms_norm_eps)
        return normed

    def logits(
        self, hidden: tuple[Tensor, Tensor], rows: Tensor | None, run: ForwardFunctions
    ) -> Tensor:
        """Logits [N, vocab] of the given rows [N] of what `hidden` returned; None: of all."""
        x, residual = hidden
        if rows is None:
            return run.head(self, x, residual)
        if rows.shape[0] == 0:
            return x.new_empty(0, self.config.vocab_size)
        return run.head(self, x[rows], residual[rows])


def forward_block(
    block: DecoderBlock, x: Tensor, residual: Tensor, inputs: ForwardInputs
) -> tuple[Tensor, Tensor]:
    """One decoder block, the unit of compilation."""
    return block(x, residual, inputs)  # type: ignore[no-any-return]


def forward_group(
    blocks: Sequence[DecoderBlock], x: Tensor, residual: Tensor, inputs: ForwardInputs
) -> tuple[Tensor, Tensor]:
    """Some decoder blocks in a row; x, residual [T, hidden] as in `DecoderBlock.forward`."""
    for block in blocks:
        x, residual = block(x, residual, inputs)
    return x, residual


def forward_head(model: HybridModel, x: Tensor, residual: Tensor) -> Tensor:
    """Logits [N, vocab] of the last block's output x, residual [N, hidden]."""
    kernels = model.kernels
    hidden, _ = kernels.add_rms_norm(x, residual, model.norm, model.config.rms_norm_eps)
    return kernels.linear(hidden, model.head)


EAGER = ForwardFunctions(block=forward_block, head=forward_head)
