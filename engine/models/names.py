"""The part of the tensor naming that all GDN-hybrid checkpoints share."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from engine.layers.attention import AttentionMixer
from engine.layers.gdn import GdnMixer
from engine.layers.mlp import DenseMlp, MoeMlp
from engine.models.hybrid import DecoderBlock, HybridModel
from engine.models.weights import WeightPlan, WeightSlot

MULTIMODAL_PREFIX = "model.language_model."
TEXT_PREFIX = "model."


GdnSlots = Callable[[GdnMixer, str], dict[str, WeightSlot]]


def plan_decoder(
    model: HybridModel,
    names: Collection[str],
    gdn_slots: GdnSlots,
    skipped_prefixes: tuple[str, ...] = (),
) -> WeightPlan:
    """Where each tensor goes; `gdn_slots` names the tensors of one GDN mixer."""
    prefix = find_prefix(names)
    slots = outer_slots(model, prefix)
    for index, block in enumerate(model.blocks):
        assert isinstance(block, DecoderBlock)
        block_prefix = f"{prefix}layers.{index}."
        slots |= block_slots(block, block_prefix, names)
        if isinstance(block.mixer, GdnMixer):
            slots |= gdn_slots(block.mixer, f"{block_prefix}linear_attn.")
    tied = (("lm_head.weight", f"{prefix}embed_tokens.weight"),)
    return WeightPlan(
        slots=slots,
        skipped_prefixes=skipped_prefixes,
        kept_prefixes=("mtp.",),
        tied=tied if model.config.tie_word_embeddings else (),
    )


def find_prefix(names: Collection[str]) -> str:
    """The prefix under which this checkpoint keeps its text model."""
    is_multimodal = any(name.startswith(MULTIMODAL_PREFIX) for name in names)
    return MULTIMODAL_PREFIX if is_multimodal else TEXT_PREFIX


def same(destination: Tensor) -> WeightSlot:
    """A slot for a tensor stored just as the model keeps it."""
    return WeightSlot(destination, tuple(destination.shape))


def rows(prefix_names: list[str], destination: Tensor, sizes: list[int]) -> dict[str, WeightSlot]:
    """Slots for tensors that the model keeps stacked along the first dim."""
    parts = destination.split(sizes, dim=0)
    return {name: same(part) for name, part in zip(prefix_names, parts, strict=True)}


def outer_slots(model: HybridModel, prefix: str) -> dict[str, WeightSlot]:
    """Embedding, final norm and head."""
    slots = {
        f"{prefix}embed_tokens.weight": same(model.embedding),
        f"{prefix}norm.weight": same(model.norm),
    }
    if not model.config.tie_word_embeddings:
        slots["lm_head.weight"] = same(model.head)
    return slots


def block_slots(block: DecoderBlock, prefix: str, names: Collection[str]) -> dict[str, WeightSlot]:
    """Everything of one block but its GDN mixer, which families name differently."""
    slots = {
        f"{prefix}input_layernorm.weight": same(block.mixer_norm),
        f"{prefix}post_attention_layernorm.weight": same(block.mlp_norm),
    }
    if isinstance(block.mlp, MoeMlp):
        slots |= moe_slots(block.mlp, f"{prefix}mlp.", names)
    else:
        slots |= dense_slots(block.mlp, f"{prefix}mlp.")
    if isinstance(block.mixer, AttentionMixer):
        slots |= attention_slots(block.mixer, f"{prefix}self_attn.")
    return slots


def attention_slots(mixer: AttentionMixer, prefix: str) -> dict[str, WeightSlot]:
    """q (with its gate), k, v, o projections and the q/k norms."""
    projections = [f"{prefix}{part}_proj.weight" for part in "qkv"]
    return {
        **rows(projections, mixer.qkv_proj, mixer.sizes),
        f"{prefix}o_proj.weight": same(mixer.o_proj),
        f"{prefix}q_norm.weight": same(mixer.q_norm),
        f"{prefix}k_norm.weight": same(mixer.k_norm),
    }


def dense_slots(mlp: DenseMlp, prefix: str) -> dict[str, WeightSlot]:
    """gate, up and down projections."""
    inner = mlp.down_proj.shape[1]
    projections = [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]
    return {
        **rows(projections, mlp.gate_up_proj, [inner, inner]),
        f"{prefix}down_proj.weight": same(mlp.down_proj),
    }


def moe_slots(mlp: MoeMlp, prefix: str, names: Collection[str]) -> dict[str, WeightSlot]:
    """Router, shared expert, and the experts stacked or one by one, as the checkpoint has them."""
    slots = {
        f"{prefix}gate.weight": same(mlp.router),
        f"{prefix}shared_expert_gate.weight": same(mlp.shared_gate),
        **dense_slots(mlp.shared, f"{prefix}shared_expert."),
    }
    if f"{prefix}experts.gate_up_proj" in names or f"{prefix}experts.down_proj" in names:
        slots[f"{prefix}experts.gate_up_proj"] = same(mlp.gate_up_proj)
        slots[f"{prefix}experts.down_proj"] = same(mlp.down_proj)
        return slots
    inner = mlp.down_proj.shape[2]
    for expert in range(mlp.gate_up_proj.shape[0]):
        name = f"{prefix}experts.{expert}."
        projections = [f"{name}gate_proj.weight", f"{name}up_proj.weight"]
        slots |= rows(projections, mlp.gate_up_proj[expert], [inner, inner])
        slots[f"{name}down_proj.weight"] = same(mlp.down_proj[expert])
    return slots
