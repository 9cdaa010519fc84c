"""The gated delta rule over whole sequences, in plain torch and through an optional kernel.

Shapes: B rows, T tokens, H key heads, G value heads (a multiple of H), K and V head dims,
C tokens of a chunk, N chunks.
"""

import importlib
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.embedded_model.training.config import ModelConfig

# (q, k, v, log_decay, beta) -> output; q, k [B,T,H,K], v [B,T,G,V], log_decay, beta [B,T,G],
# output [B,T,G,V]. q and k are normalized inside.
DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_MAX_RELATIVE_ERROR = 0.03


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Run the rule chunk by chunk in float32.

    Within a chunk the rank-one updates are solved together (Yang et al., "Gated Delta Networks",
    2024, the chunkwise form); only the state passes between chunks.
    """
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]
    C = 64 if q.is_cuda else 32
    N = -(-T // C)

    def chunks(x: Tensor) -> Tensor:
        """[B,T,G,*] -> [B,G,N,C,*], padded with zeros."""
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, N * C - T))
        return x.transpose(1, 2).reshape(B, G, N, C, *x.shape[3:])

    q_chunks, k_chunks = (
        chunks(F.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(G // H, 2))
        for x in (q, k)
    )
    q_chunks = q_chunks * K**-0.5
    v_chunks, beta_chunks = chunks(v), chunks(beta)
    decay = chunks(log_decay).cumsum(-1)
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    k_beta = k_chunks * beta_chunks[..., None]
    coupling = -(k_beta @ k_chunks.transpose(-1, -2) * between).tril(-1)
    updates = torch.cat([v_chunks * beta_chunks[..., None], k_beta * decay.exp()[..., None]], -1)
    values, keys = _solve_unit_lower(coupling, updates).split([V, K], -1)
    state, outputs = q_chunks.new_zeros(B, G, K, V), []
    for i in range(N):
        q_i, k_i, decay_i = q_chunks[:, :, i], k_chunks[:, :, i], decay[:, :, i]
        new_values = values[:, :, i] - keys[:, :, i] @ state
        scores = (q_i @ k_i.transpose(-1, -2) * between[:, :, i]).tril()
        outputs.append((q_i * decay_i.exp()[..., None]) @ state + scores @ new_values)
        end = decay_i[..., -1:]
        k_end = k_i * (end - decay_i).exp()[..., None]
        state = state * end.exp()[..., None] + k_end.transpose(-1, -2) @ new_values
    return torch.stack(outputs, 2).reshape(B, G, N * C, V).transpose(1, 2)[:, :T]


def _solve_unit_lower(coupling: Tensor, right: Tensor) -> Tensor:
    """(I - L)^-1 R for strictly lower triangular L [.., C, C]: (I + L)(I + L^2)(I + L^4) ... R."""
    right = right + coupling @ right
    size = 2
    while size < coupling.shape[-1]:
        coupling = coupling @ coupling
        right = right + coupling @ right
        size *= 2
    return right


def choose_delta_rule(kernel: str, config: ModelConfig, device: str) -> DeltaRule:
    """Return the rule for `kernel`: "torch" or "fla" (the package flash-linear-attention, CUDA).

    Raises:
        ValueError: the kernel is unknown or cannot run on the device.
        ImportError: the package is not installed.
        RuntimeError: an output or gradient of the kernel differs from plain torch.
    """
    if kernel == "torch":
        return chunked_delta_rule
    if kernel != "fla":
        raise ValueError(f"gdn kernel {kernel!r} is unknown; accepted: torch, fla")
    if device != "cuda":
        raise ValueError(f"gdn kernel fla needs device cuda, not {device}; use torch")
    # By name: the package is optional, and importing it without a GPU fails.
    module = importlib.import_module("tools.embedded_model.training.fla_rule")
    rule: DeltaRule = module.fla_delta_rule
    errors = _relative_errors(rule, config, device)
    shown = " ".join(f"{error:.4f}" for error in errors)
    print(f"relative errors of output and gradients against torch: {shown}", flush=True)
    if not all(math.isfinite(error) and error < _MAX_RELATIVE_ERROR for error in errors):
        raise RuntimeError(f"gdn kernel fla is wrong on this machine ({shown}); use torch")
    return rule


def _relative_errors(rule: DeltaRule, config: ModelConfig, device: str) -> list[float]:
    """Errors of the output and of the gradients of q, k, v, log_decay and beta."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, 512, *shape, device=device, dtype=torch.bfloat16)

    H, K = config.linear_num_key_heads, config.linear_key_head_dim
    G, V = config.linear_num_value_heads, config.linear_value_head_dim
    q, k, v, weight = random(H, K), random(H, K), random(G, V), random(G, V).float()
    log_decay, beta = -F.softplus(random(G).float()) * 0.2, random(G).float().sigmoid()
    results = []
    for function in (rule, chunked_delta_rule):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, log_decay, beta)]
        output = function(*inputs).float()
        (output * weight).sum().backward()
        gradients = [x.grad.float() for x in inputs if x.grad is not None]
        results.append([output.detach(), *gradients])
    return [float((x - y).norm() / y.norm()) for x, y in zip(*results, strict=True)]
