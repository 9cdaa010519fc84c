"""The arithmetic of one multi-token-prediction layer, fp32, from its formulas.

A pair is (token p+1, hidden p) at rope position p. A chain is the pairs that drafts add behind
one last pair; it sees all pairs up to that one, and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class MtpShape:
    """What the names and shapes of the tensors do not tell."""

    head_dim: int
    rotary_dim: int
    rope_theta: float
    eps: float
    num_experts_per_token: int
    is_top_k_normalised: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MtpShape:
        """From the text config of a checkpoint as transformers reads it."""
        rope = config["rope_parameters"]
        return cls(
            head_dim=config["head_dim"],
            rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=rope["rope_theta"],
            eps=config["rms_norm_eps"],
            num_experts_per_token=config.get("num_experts_per_tok", 0),
            is_top_k_normalised=config.get("norm_topk_prob", True),
        )


@dataclass(frozen=True)
class Pairs:
    """Keys and values of pairs: [num_pairs, num_kv_heads, head_dim], keys turned by rope."""

    keys: Tensor
    values: Tensor


@dataclass
class Chains:
    """Chains that grow together, one pair each at a time.

    `last_pairs` [num_chains] says which of `pairs` each grows behind; own keys and values are
    [num_chains, num_own, num_kv_heads, head_dim].
    """

    pairs: Pairs
    last_pairs: Tensor
    own_keys: Tensor
    own_values: Tensor


class MtpLayer:
    """`tensors` by their names after `mtp.`."""

    def __init__(self, tensors: dict[str, Tensor], shape: MtpShape) -> None:
        self.tensors = stack_experts(tensors)
        self.shape = shape

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Rows after `mtp.norm`, of all pairs from position 0 on; all [num_pairs, hidden]."""
        return self.read(embedded, hidden)[0]

    def read(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Pairs]:
        """`forward`, and the keys and values that later pairs see."""
        num_pairs = embedded.shape[0]
        entered = self._enter(embedded, hidden)
        queries, gates, pairs = self._project(entered, torch.arange(num_pairs))
        scores = self._scores(queries, pairs.keys)
        is_later = torch.ones(num_pairs, num_pairs, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(is_later[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("qhs,shd->qhd", weights, self._per_query_head(pairs.values, 1))
        return self._leave(entered, mixed, gates), pairs

    def start_chains(self, pairs: Pairs, last_pairs: Tensor) -> Chains:
        """Chains without a pair of their own, one behind each of `last_pairs`."""
        empty = pairs.keys.new_zeros(last_pairs.numel(), 0, *pairs.keys.shape[1:])
        return Chains(pairs, last_pairs, empty, empty)

    def extend_chains(self, chains: Chains, embedded: Tensor, hidden: Tensor) -> Tensor:
        """One pair more for each chain: rows after `mtp.norm` [num_chains, hidden]."""
        num_own = chains.own_keys.shape[1]
        entered = self._enter(embedded, hidden)
        queries, gates, new = self._project(entered, chains.last_pairs + 1 + num_own)
        chains.own_keys = torch.cat([chains.own_keys, new.keys[:, None]], 1)
        chains.own_values = torch.cat([chains.own_values, new.values[:, None]], 1)
        num_pairs = chains.pairs.keys.shape[0]
        is_later = torch.arange(num_pairs)[None] > chains.last_pairs[:, None]
        shared = self._scores(queries, chains.pairs.keys)
        shared = shared.masked_fill(is_later[:, None], -torch.inf)
        own_keys = self._per_query_head(chains.own_keys, 2)
        own = torch.einsum("chd,cohd->cho", queries, own_keys) * self.shape.head_dim**-0.5
        weights = torch.cat([shared, own], -1).softmax(-1)
        values = self._per_query_head(chains.pairs.values, 1)
        mixed = torch.einsum("chs,shd->chd", weights[..., :num_pairs], values)
        own_values = self._per_query_head(chains.own_values, 2)
        mixed = mixed + torch.einsum("cho,cohd->chd", weights[..., num_pairs:], own_values)
        return self._leave(entered, mixed, gates)

    def _enter(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        halves = (
            self._norm(embedded, "pre_fc_norm_embedding"),
            self._norm(hidden, "pre_fc_norm_hidden"),
        )
        return self._linear(torch.cat(halves, -1), "fc")

    def _project(self, entered: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Pairs]:
        x = self._norm(entered, "layers.0.input_layernorm")
        num_rows, head_dim = x.shape[0], self.shape.head_dim
        both = self._linear(x, "layers.0.self_attn.q_proj").view(num_rows, -1, 2 * head_dim)
        queries, gates = both[..., :head_dim], both[..., head_dim:]
        keys = self._linear(x, "layers.0.self_attn.k_proj").view(num_rows, -1, head_dim)
        values = self._linear(x, "layers.0.self_attn.v_proj").view(num_rows, -1, head_dim)
        queries = self._rotate(self._norm(queries, "layers.0.self_attn.q_norm"), positions)
        keys = self._rotate(self._norm(keys, "layers.0.self_attn.k_norm"), positions)
        return queries, gates, Pairs(keys, values)

    def _leave(self, entered: Tensor, mixed: Tensor, gates: Tensor) -> Tensor:
        gated = (mixed * torch.sigmoid(gates)).flatten(1)
        x = entered + self._linear(gated, "layers.0.self_attn.o_proj")
        x = x + self._feed_forward(self._norm(x, "layers.0.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _feed_forward(self, x: Tensor) -> Tensor:
        prefix = "layers.0.mlp."
        if f"{prefix}gate.weight" not in self.tensors:
            return self._swiglu(x, prefix)
        shares = self._linear(x, f"{prefix}gate").softmax(-1)
        chosen = shares.topk(self.shape.num_experts_per_token)
        weights = chosen.values
        if self.shape.is_top_k_normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        gate_up = self.tensors[f"{prefix}experts.gate_up_proj"]
        down = self.tensors[f"{prefix}experts.down_proj"]
        rows = []
        for row, experts, of_expert in zip(x, chosen.indices.tolist(), weights, strict=True):
            outputs = []
            for expert in experts:
                gate, up = (gate_up[expert] @ row).chunk(2)
                outputs.append(down[expert] @ (F.silu(gate) * up))
            rows.append(of_expert @ torch.stack(outputs))
        shared = self._swiglu(x, f"{prefix}shared_expert.")
        share = torch.sigmoid(self._linear(x, f"{prefix}shared_expert_gate"))
        return torch.stack(rows) + share * shared

    def _swiglu(self, x: Tensor, prefix: str) -> Tensor:
        gated = F.silu(self._linear(x, f"{prefix}gate_proj"))
        return self._linear(gated * self._linear(x, f"{prefix}up_proj"), f"{prefix}down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.eps)
        return scaled * (1.0 + self.tensors[f"{name}.weight"])

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rope on the first dims of x [num_rows, heads, head_dim], half against half."""
        half = self.shape.rotary_dim // 2
        frequencies = self.shape.rope_theta ** -(torch.arange(half).double() / half)
        angles = (positions[:, None].double() * frequencies)[:, None].float()
        first, second, kept = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        turned = (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        )
        return torch.cat([*turned, kept], -1)

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        keys = self._per_query_head(keys, 1)
        return torch.einsum("qhd,shd->qhs", queries, keys) * self.shape.head_dim**-0.5

    def _per_query_head(self, x: Tensor, head_axis: int) -> Tensor:
        rows = self.tensors["layers.0.self_attn.q_proj.weight"].shape[0]
        num_q_heads = rows // (2 * self.shape.head_dim)
        return x.repeat_interleave(num_q_heads // x.shape[head_axis], head_axis)


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that have tensors of their own, in one tensor; other tensors as they are."""
    prefix = "layers.0.mlp.experts."
    if f"{prefix}0.gate_proj.weight" not in tensors:
        return tensors
    stacked = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    names = [name for name in tensors if name.startswith(prefix)]
    num_experts = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in names)
    gates, ups, downs = (
        torch.stack([tensors[f"{prefix}{e}.{name}_proj.weight"] for e in range(num_experts)])
        for name in ("gate", "up", "down")
    )
    stacked[f"{prefix}gate_up_proj"] = torch.cat([gates, ups], 1)
    stacked[f"{prefix}down_proj"] = downs
    return stacked
