"""Tensor names of the qwen3_next family: fused projections, grouped per key head."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from engine.layers.gdn import GdnMixer
from engine.models.hybrid import HybridModel
from engine.models.names import plan_decoder, same
from engine.models.qwen3_5.weights import conv_slot
from engine.models.weights import WeightPlan, WeightSlot


def plan_weights(model: HybridModel, names: Collection[str]) -> WeightPlan:
    """Where each tensor of a checkpoint with these names goes."""
    return plan_decoder(model, names, gdn_slots)


def gdn_slots(mixer: GdnMixer, prefix: str) -> dict[str, WeightSlot]:
    """in_proj_qkvz holds, per key head, q, k, the v and the z of its value heads; ba likewise."""
    conv_dim, value_dim, num_v_heads, _ = mixer.sizes
    heads = mixer.num_k_heads
    key_rows = (conv_dim - value_dim) // 2 // heads
    value_rows = value_dim // heads
    repeats = num_v_heads // heads
    hidden = mixer.in_proj.shape[1]
    qkvz = mixer.in_proj[: conv_dim + value_dim]
    ba = mixer.in_proj[conv_dim + value_dim :]
    qkvz_sizes = [key_rows, key_rows, value_rows, value_rows]
    return {
        f"{prefix}in_proj_qkvz.weight": WeightSlot(
            qkvz, (qkvz.shape[0], hidden), partial(ungroup_rows, heads, qkvz_sizes)
        ),
        f"{prefix}in_proj_ba.weight": WeightSlot(
            ba, (ba.shape[0], hidden), partial(ungroup_rows, heads, [repeats, repeats])
        ),
        f"{prefix}conv1d.weight": conv_slot(mixer),
        f"{prefix}A_log": same(mixer.a_log),
        f"{prefix}dt_bias": same(mixer.dt_bias),
        f"{prefix}norm.weight": same(mixer.norm),
        f"{prefix}out_proj.weight": same(mixer.out_proj),
    }


def ungroup_rows(num_groups: int, sizes: list[int], weight: Tensor) -> Tensor:
    """Rows ordered [group][part] become [part][group]; `sizes` are a group's part lengths."""
    parts = weight.view(num_groups, sum(sizes), -1).split(sizes, dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])
