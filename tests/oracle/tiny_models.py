"""Tiny random checkpoints of every family, made and saved by transformers.

Weights are drawn so that logits have a deviation of about 1: with the usual 0.02 every logit
would be near zero, and any difference with it. Decays stay above 0.5 per token: a head that
forgets faster outputs little more than the product of one query and one key, which in 16 dims
can be near zero by chance, and the norm behind it then magnifies rounding (transformers in
fp32 is then as far from its own fp64 as we are).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


@dataclass(frozen=True)
class TinyCase:
    """One model to make. `heads` are (query, key) heads and their dim, `gdn` the key heads,
    value heads, key dim and value dim, `rotary` the rotating fraction of a head."""

    name: str
    heads: tuple[int, int, int]
    gdn: tuple[int, int, int, int]
    rotary: float
    hidden: int = 40
    vocab: int = 97
    num_layers: int = 4
    extra: Mapping[str, Any] = field(default_factory=dict)

    def text_fields(self) -> dict[str, Any]:
        """The fields that all families share, and this case's own."""
        num_q_heads, num_kv_heads, head_dim = self.heads
        num_k_heads, num_v_heads, head_k_dim, head_v_dim = self.gdn
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 56,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_q_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "linear_num_key_heads": num_k_heads,
            "linear_num_value_heads": num_v_heads,
            "linear_key_head_dim": head_k_dim,
            "linear_value_head_dim": head_v_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": self.rotary,
            },
            "max_position_embeddings": 512,
            **self.extra,
        }


DENSE_CASES = (
    TinyCase("dense-gqa3-ratio3", (6, 2, 32), (2, 6, 32, 16), 0.25),
    TinyCase(
        "dense-gqa1-ratio1",
        (4, 4, 16),
        (3, 3, 16, 32),
        0.5,
        hidden=33,
        vocab=131,
        num_layers=3,
        extra={"full_attention_interval": 2, "linear_conv_kernel_dim": 3},
    ),
    TinyCase(
        "dense-gqa4-tied",
        (4, 1, 16),
        (1, 2, 32, 32),
        1.0,
        extra={"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
)
MOE_CASES = (
    TinyCase("moe-gqa2-ratio2", (4, 2, 32), (2, 4, 16, 16), 0.25, extra=EXPERTS),
    TinyCase(
        "moe-gqa3-top1",
        (3, 1, 16),
        (2, 6, 16, 32),
        0.75,
        hidden=36,
        num_layers=3,
        extra={**EXPERTS, "num_experts_per_tok": 1, "full_attention_interval": 3},
    ),
)
NEXT_CASES = (
    TinyCase("next-moe-ratio2", (4, 1, 32), (2, 4, 32, 16), 0.25, extra=EXPERTS),
    TinyCase(
        "next-mixed-ratio3",
        (6, 3, 16),
        (2, 6, 16, 32),
        0.5,
        vocab=113,
        num_layers=5,
        extra={
            **EXPERTS,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "full_attention_interval": 2,
        },
    ),
    TinyCase("next-dense-ratio1", (2, 2, 32), (3, 3, 16, 16), 0.25, extra={"num_experts": 0}),
)


# Which families can hold which cases: nested ones have a vision tower and the longer prefix.
CASES_BY_FAMILY: Mapping[str, tuple[TinyCase, ...]] = {
    "qwen3_5_text": DENSE_CASES,
    "qwen3_5": DENSE_CASES[:1],
    "qwen3_5_moe_text": MOE_CASES[:1],
    "qwen3_5_moe": MOE_CASES,
    "qwen3_next": NEXT_CASES,
}


def build_oracle(family: str, case: TinyCase, seed: int = 0) -> PreTrainedModel:
    """The transformers model of a case, with random weights, in fp32.

    `family`: qwen3_5, qwen3_5_moe (each nested, with a vision tower), qwen3_5_text,
    qwen3_5_moe_text or qwen3_next.
    """
    model = empty_oracle(family, case.text_fields())
    fill_random(model, seed)
    return model.eval()


def empty_oracle(family: str, text: dict[str, Any]) -> PreTrainedModel:
    """The model class that transformers has for the family, with its own initial weights."""
    if family == "qwen3_5_text":
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    if family == "qwen3_5_moe_text":
        return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text))
    if family == "qwen3_next":
        return Qwen3NextForCausalLM(Qwen3NextConfig(**text))
    outer = {
        "text_config": text,
        "vision_config": {**VISION, "out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "image_token_id": 1,
        "video_token_id": 2,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
    }
    if family == "qwen3_5":
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**outer))
    assert family == "qwen3_5_moe"
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**outer))


def fill_random(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near deviation 1, and decays from 0.5 to almost 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log") or name.endswith("dt_bias"):
                parameter.uniform_(-3.0, 0.0, generator=generator)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.normal_(std=0.2, generator=generator)
            else:
                # A conv weight is [channels, 1, taps]: its fan-in is its last dim too.
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)


def save_stacked(model: PreTrainedModel, folder: Path) -> None:
    """Save with the experts of a layer in one tensor; save_pretrained writes them one by one."""
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates after `prompt`, greedily, whatever the config calls an end."""
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids,
        # Left out, it would be guessed from where the padding token occurs in the prompt.
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


def all_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab] of one forward over the whole sequence."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]
