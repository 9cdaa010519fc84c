"""Tensor names of the qwen3_5 family, dense and MoE."""

from __future__ import annotations

from collections.abc import Collection

from engine.layers.gdn import GdnMixer
from engine.models.hybrid import HybridModel
from engine.models.names import plan_decoder, rows, same
from engine.models.weights import WeightPlan, WeightSlot


def plan_weights(model: HybridModel, names: Collection[str]) -> WeightPlan:
    """Where each tensor of a checkpoint with these names goes."""
    return plan_decoder(model, names, gdn_slots, skipped_prefixes=("model.visual.", "visual."))


def gdn_slots(mixer: GdnMixer, prefix: str) -> dict[str, WeightSlot]:
    """Separate projections for q/k/v, z, b and a."""
    parts = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    return {
        **rows([f"{prefix}{part}.weight" for part in parts], mixer.in_proj, mixer.sizes),
        f"{prefix}conv1d.weight": conv_slot(mixer),
        f"{prefix}A_log": same(mixer.a_log),
        f"{prefix}dt_bias": same(mixer.dt_bias),
        f"{prefix}norm.weight": same(mixer.norm),
        f"{prefix}out_proj.weight": same(mixer.out_proj),
    }


def conv_slot(mixer: GdnMixer) -> WeightSlot:
    """The depthwise conv is stored [channels, 1, taps]."""
    channels, taps = mixer.conv.shape
    return WeightSlot(mixer.conv, (channels, 1, taps), arrange=lambda weight: weight.squeeze(1))
