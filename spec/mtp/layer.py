"""The multi-token-prediction layer of a checkpoint: one attention block over (token, hidden) pairs.

A pair is the token at p + 1 and the target's hidden state at p, after the final norm. Its keys and
values lie where the token's are, so that what a page holds depends on nothing after it; it is
turned to position p. Token 0 has no pair.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.attention.protocol import AttentionBackend
from engine.cache.pools import KvLayer
from engine.layers.attention import AttentionMixer
from engine.layers.mlp import DenseMlp, MoeMlp
from engine.layers.parameter import empty_weight
from engine.loader import load_weights
from engine.model_config import ModelConfig
from engine.models.hybrid import BlockForward, DecoderBlock
from engine.models.names import block_slots, same
from engine.models.weights import WeightPlan
from graphs.inputs import ForwardInputs
from graphs.kernels.kernel_set import KernelSet

PREFIX = "mtp."
# What else a checkpoint has; a folder of nothing but PREFIX has none of it.
TARGET_PREFIXES = ("model.", "lm_head.", "visual.")
FIRST_PAIR = 1


class MtpLayer(nn.Module):
    """fc([norm(embedding of the token) | norm(hidden)]), a decoder block, a norm."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KvLayer,
        backend: AttentionBackend,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """With uninitialised weights; cache has FIRST_PAIR as its first token."""
        super().__init__()
        self.kernels, self.eps = kernels, config.rms_norm_eps
        hidden = config.hidden_size
        mixer = AttentionMixer(config, cache, backend, kernels, dtype, device)
        mlp = (
            MoeMlp(config, kernels, dtype, device)
            if any(config.is_moe)
            else DenseMlp(hidden, config.intermediate_size, kernels, dtype, device)
        )
        self.block = DecoderBlock(config, mixer, mlp, kernels, dtype, device)
        self.fc = empty_weight(hidden, 2 * hidden, dtype=dtype, device=device)
        self.embedding_norm = empty_weight(hidden, dtype=dtype, device=device)
        self.hidden_norm = empty_weight(hidden, dtype=dtype, device=device)
        self.norm = empty_weight(hidden, dtype=dtype, device=device)

    def forward(
        self,
        embedding: Tensor,
        token_ids: Tensor,
        hidden: Tensor,
        inputs: ForwardInputs,
        run: BlockForward,
    ) -> Tensor:
        """What stands for the hidden state after each pair's token, [T, hidden].

        embedding [vocab, hidden]; token_ids [T] and hidden [T, hidden] of the pairs; inputs say
        where they are, as of the tokens.
        """
        embedded = self.normed(F.embedding(token_ids, embedding), self.embedding_norm)
        pair = torch.cat([embedded, self.normed(hidden, self.hidden_norm)], dim=-1)
        x = self.kernels.linear(pair, self.fc)
        x, residual = run(self.block, x, torch.zeros_like(x), pair_inputs(inputs))
        out, _ = self.kernels.add_rms_norm(x, residual, self.norm, self.eps)
        return out

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm of x [T, hidden]."""
        return self.kernels.add_rms_norm(x, torch.zeros_like(x), weight, self.eps)[0]


def pair_inputs(inputs: ForwardInputs) -> ForwardInputs:
    """Of the rows of tokens, those of their pairs: a position before. Token 0 is never seen."""
    return replace(inputs, positions=(inputs.positions - FIRST_PAIR).clamp_min(0))


def load_layer(layer: MtpLayer, folder: Path, device: torch.device) -> None:
    """Fill the layer from the checkpoint in `folder`.

    Raises:
        ValueError: the folder has no such layer, or not all of it; names what is missing.
    """

    def plan_layer(names: Collection[str]) -> WeightPlan:
        if not any(name.startswith(PREFIX) for name in names):
            raise ValueError(
                f"--speculative-algorithm mtp: {folder} has no tensors {PREFIX}*; name a folder "
                f"that has them with --speculative-draft-model-path, or use ngram"
            )
        slots = {
            f"{PREFIX}fc.weight": same(layer.fc),
            f"{PREFIX}pre_fc_norm_embedding.weight": same(layer.embedding_norm),
            f"{PREFIX}pre_fc_norm_hidden.weight": same(layer.hidden_norm),
            f"{PREFIX}norm.weight": same(layer.norm),
            **block_slots(layer.block, f"{PREFIX}layers.0.", names),
        }
        return WeightPlan(slots=slots, skipped_prefixes=TARGET_PREFIXES)

    load_weights(folder, plan_layer, device, progress=False)
