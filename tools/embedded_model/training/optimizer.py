"""Muon for the weight matrices, AdamW for everything else, and their schedule."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from tools.embedded_model.training.config import TrainConfig

_WARMUP_STEPS = 100
_DECAY_SHARE = 0.4
_MIN_DECAY = 0.02
_MOMENTUM_STEPS = 300
# Table rows and the tiny gate projections are not matrices to orthogonalize.
_NOT_MATRICES = ("embed", "in_proj_a", "in_proj_b")
# Coefficients of the quintic iteration of Jordan et al., "Muon" (2024).
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Muon:
    """Momentum whose update is orthogonalized; matrices of one shape are handled together."""

    def __init__(self, matrices: Sequence[nn.Parameter], weight_decay: float = 0.01) -> None:
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = {}
        for matrix in matrices:
            self.groups.setdefault((matrix.shape[0], matrix.shape[1]), []).append(matrix)
        self.buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self.groups.items()
        }
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float, momentum: float) -> None:
        """Update every matrix from its gradient, with Nesterov momentum."""
        for shape, group in self.groups.items():
            gradients = torch.stack([matrix.grad.float() for matrix in group])
            buffer = self.buffers[shape]
            buffer.lerp_(gradients, 1 - momentum)
            updates = orthogonalize(gradients.lerp(buffer, momentum))
            updates = updates * max(1, shape[0] / shape[1]) ** 0.5
            for matrix, update in zip(group, updates, strict=True):
                matrix.mul_(1 - lr * self.weight_decay).add_(update.to(matrix.dtype), alpha=-lr)


def orthogonalize(matrices: Tensor) -> Tensor:
    """[N,R,C] -> float32 [N,R,C] with singular values near one; in bfloat16 on a GPU."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Optimizer:
    """Both optimizers of a network under one schedule."""

    def __init__(self, muon: Muon, adam: torch.optim.AdamW, config: TrainConfig) -> None:
        self.muon, self.adam, self.config = muon, adam, config

    @classmethod
    def of(cls, net: nn.Module, config: TrainConfig, device: str) -> Self:
        """Split the parameters of a network between the two."""
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in net.named_parameters():
            is_matrix = parameter.dim() == 2 and not any(part in name for part in _NOT_MATRICES)
            (matrices if is_matrix else rest).append(parameter)
        adam = torch.optim.AdamW(
            rest, lr=config.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
        )
        return cls(Muon(matrices), adam, config)

    def step(self, step: int, lr_scale: float) -> None:
        """Apply the gradients; both learning rates are scaled by `lr_scale`."""
        (group,) = self.adam.param_groups
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = self.config.adam_lr * lr_scale
        momentum = min(0.95, 0.85 + 0.1 * step / _MOMENTUM_STEPS)
        self.muon.step(self.config.muon_lr * lr_scale, momentum)
        self.adam.step()


def learning_rate_scale(step: int, progress: float) -> float:
    """Warm up by steps, stay, and decay linearly over the last part of a run (progress 0 to 1)."""
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    return warmup * min(1.0, max(_MIN_DECAY, (1 - progress) / _DECAY_SHARE))
