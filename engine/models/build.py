"""From a model config to an empty model and the names of its weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from engine.attention.protocol import AttentionBackend
from engine.cache.pools import CachePools
from engine.model_config import ModelConfig
from engine.models.hybrid import HybridModel
from engine.models.qwen3_5.weights import plan_weights as plan_qwen3_5
from engine.models.qwen3_next.weights import plan_weights as plan_qwen3_next
from engine.models.weights import WeightPlan
from graphs.kernels.kernel_set import KernelSet

PlanWeights = Callable[[HybridModel, Collection[str]], WeightPlan]

WEIGHT_PLANS: dict[str, PlanWeights] = {
    "qwen3_5": plan_qwen3_5,
    "qwen3_next": plan_qwen3_next,
}


def build_model(
    config: ModelConfig,
    pools: CachePools,
    backend: AttentionBackend,
    kernels: KernelSet,
    dtype: torch.dtype,
    device: torch.device,
) -> HybridModel:
    """A model with uninitialised weights, holding its views of the pools."""
    return HybridModel(config, pools, backend, kernels, dtype, device).eval()


def plan_weights(model: HybridModel, names: Collection[str]) -> WeightPlan:
    """Which checkpoint tensor goes where, by the model's family."""
    return WEIGHT_PLANS[model.config.family](model, names)
