"""The numbers of one model, from its config.json; nothing here is known without that file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from engine.json_file import read_json_file
from engine.model_fields import (
    DTYPES,
    GenerationFields,
    OuterFields,
    TextFields,
    TokenIds,
    check_heads,
    check_switches,
    find_rope,
)

MAX_CONFIG_BYTES = 4 * 2**20


class LayerKind(StrEnum):
    """How a layer mixes tokens; the values are the names in `layer_types`."""

    GDN = "linear_attention"
    ATTENTION = "full_attention"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model.

    `model_type` is as found in the file, `family` names the tensor naming it follows.
    `layer_kinds` and `is_moe` have one entry per layer. `rotary_dim` counts the leading dims
    of a head that rotate. `intermediate_size` is 0 without dense layers, `num_experts` and the
    other MoE sizes are 0 without MoE layers. `dtype` is the checkpoint's own, as torch names it.
    """

    model_type: str
    family: str
    vocab_size: int
    hidden_size: int
    layer_kinds: tuple[LayerKind, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    mtp_num_layers: int

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    num_k_heads_gdn: int
    num_v_heads_gdn: int
    head_k_dim_gdn: int
    head_v_dim_gdn: int
    conv_kernel: int

    is_moe: tuple[bool, ...]
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def key_dim(self) -> int:
        """Channels of all GDN keys (and of all GDN queries)."""
        return self.num_k_heads_gdn * self.head_k_dim_gdn

    @property
    def value_dim(self) -> int:
        """Channels of all GDN values."""
        return self.num_v_heads_gdn * self.head_v_dim_gdn

    @property
    def conv_dim(self) -> int:
        """Channels of the GDN convolution: q, k and v."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` stands for. `is_moe` None: the fields decide layer by layer."""

    family: str
    is_moe: bool | None


DENSE_QWEN3_5 = Architecture("qwen3_5", is_moe=False)
MOE_QWEN3_5 = Architecture("qwen3_5", is_moe=True)
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen3_5": DENSE_QWEN3_5,
        "qwen3_5_text": DENSE_QWEN3_5,
        "qwen3_5_moe": MOE_QWEN3_5,
        "qwen3_5_moe_text": MOE_QWEN3_5,
        "qwen3_next": Architecture("qwen3_next", is_moe=None),
    }
)


def load_model_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in `folder`; eos ids in generation_config.json win.

    Raises:
        ValueError: a file is absent or broken, or a field is missing or not supported; the
            message names the file, the field and what is accepted.
    """
    path = folder / "config.json"
    raw = read_json_file(path, dict[str, Any], max_bytes=MAX_CONFIG_BYTES)
    generation_path = folder / "generation_config.json"
    generation = GenerationFields()
    if generation_path.exists():
        generation = read_json_file(generation_path, GenerationFields, max_bytes=MAX_CONFIG_BYTES)
    try:
        return parse_model_config(raw, generation.eos_token_id)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_model_config(raw: dict[str, Any], generation_eos: TokenIds = None) -> ModelConfig:
    """The config in `raw`, whose text fields are nested in `text_config` or stand beside it.

    Raises:
        ValueError: a field is missing or not supported; the message names it.
    """
    outer = msgspec.convert(raw, OuterFields)
    architecture = find_architecture(outer.model_type)
    if outer.text_config is None:
        text = msgspec.convert(raw, TextFields)
    else:
        try:
            text = msgspec.convert(outer.text_config, TextFields)
        except msgspec.ValidationError as error:
            raise ValueError(f"text_config: {error}") from error
    if text.model_type is not None and find_architecture(text.model_type) != architecture:
        raise ValueError(
            f"text_config.model_type {text.model_type!r} does not go with model_type "
            f"{outer.model_type!r}"
        )
    check_switches(outer, text)
    check_heads(text)
    return build_config(architecture, outer, text, generation_eos)


def build_config(
    architecture: Architecture, outer: OuterFields, text: TextFields, generation_eos: TokenIds
) -> ModelConfig:
    """The config from fields whose switches and head counts are checked."""
    is_moe = find_moe_layers(architecture, text)
    has_moe, has_dense = any(is_moe), not all(is_moe)
    rope_theta, rotary_dim = find_rope(text)
    eos = (generation_eos, text.eos_token_id, outer.eos_token_id)
    # The outer switch speaks for the whole model; files without it have the inner one.
    is_tied = outer.tie_word_embeddings
    return ModelConfig(
        model_type=outer.model_type,
        family=architecture.family,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layer_kinds=find_layer_kinds(text),
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=text.rms_norm_eps,
        tie_word_embeddings=bool(text.tie_word_embeddings if is_tied is None else is_tied),
        dtype=find_dtype(text.dtype, text.torch_dtype, outer.dtype, outer.torch_dtype),
        eos_token_ids=find_eos_ids(eos, text.vocab_size),
        mtp_num_layers=text.mtp_num_hidden_layers,
        num_q_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        num_k_heads_gdn=text.linear_num_key_heads,
        num_v_heads_gdn=text.linear_num_value_heads,
        head_k_dim_gdn=text.linear_key_head_dim,
        head_v_dim_gdn=text.linear_value_head_dim,
        conv_kernel=text.linear_conv_kernel_dim,
        is_moe=is_moe,
        intermediate_size=size_if(has_dense, "intermediate_size", text.intermediate_size),
        num_experts=size_if(has_moe, "num_experts", text.num_experts),
        num_experts_per_tok=size_if(has_moe, "num_experts_per_tok", text.num_experts_per_tok),
        moe_intermediate_size=size_if(has_moe, "moe_intermediate_size", text.moe_intermediate_size),
        shared_expert_intermediate_size=size_if(
            has_moe, "shared_expert_intermediate_size", text.shared_expert_intermediate_size
        ),
        norm_topk_prob=text.norm_topk_prob,
    )


def find_architecture(model_type: str) -> Architecture:
    """Raises ValueError with the accepted names for a model_type not in the table."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; accepted are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


def find_layer_kinds(text: TextFields) -> tuple[LayerKind, ...]:
    """`layer_types`, or full attention in every full_attention_interval-th layer."""
    if text.layer_types is None:
        return tuple(
            LayerKind.GDN if (index + 1) % text.full_attention_interval else LayerKind.ATTENTION
            for index in range(text.num_hidden_layers)
        )
    if len(text.layer_types) != text.num_hidden_layers:
        raise ValueError(
            f"layer_types has {len(text.layer_types)} entries; accepted is one per layer "
            f"(num_hidden_layers is {text.num_hidden_layers})"
        )
    for index, name in enumerate(text.layer_types):
        if name not in set(LayerKind):
            raise ValueError(
                f"layer_types[{index}] {name!r} is not supported; accepted are "
                f"{', '.join(LayerKind)}"
            )
    return tuple(LayerKind(name) for name in text.layer_types)


def find_moe_layers(architecture: Architecture, text: TextFields) -> tuple[bool, ...]:
    """Which layers have experts."""
    layers = range(text.num_hidden_layers)
    dense_layers = set(text.mlp_only_layers or ())
    if architecture.is_moe is None:
        if text.num_experts is None:
            raise ValueError("num_experts is missing; accepted is an integer >= 0 (0: no experts)")
        is_moe = tuple(
            text.num_experts > 0
            and index not in dense_layers
            and (index + 1) % text.decoder_sparse_step == 0
            for index in layers
        )
    elif architecture.is_moe:
        if dense_layers or text.decoder_sparse_step != 1 or not text.norm_topk_prob:
            raise ValueError(
                "this model_type accepts only mlp_only_layers [], decoder_sparse_step 1 and "
                "norm_topk_prob true"
            )
        is_moe = tuple(True for _ in layers)
    else:
        if text.num_experts:
            raise ValueError(
                f"num_experts {text.num_experts}: a dense model_type accepts 0 or no such field"
            )
        is_moe = tuple(False for _ in layers)
    if any(is_moe) and (text.num_experts_per_tok or 0) > (text.num_experts or 0):
        raise ValueError(
            f"num_experts_per_tok ({text.num_experts_per_tok}) must not exceed num_experts "
            f"({text.num_experts})"
        )
    return is_moe


def size_if(is_needed: bool, field: str, value: int | None) -> int:
    """`value` where a layer needs it, else 0."""
    if not is_needed:
        return 0
    if not value:
        raise ValueError(f"{field} is missing or 0; accepted is an integer >= 1")
    return value


def find_dtype(*candidates: str | None) -> str:
    """The first that is given; float32 where none is, as torch would make the weights."""
    name = next((name for name in candidates if name is not None), "float32")
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not supported; accepted are {', '.join(DTYPES)}")
    return name


def find_eos_ids(candidates: tuple[TokenIds, ...], vocab_size: int) -> tuple[int, ...]:
    """The first that is given, as a tuple; empty where none is.

    Ids outside the vocabulary, which some files carry, can never be sampled and are left out.
    """
    found = next((ids for ids in candidates if ids is not None), [])
    eos_ids = (found,) if isinstance(found, int) else tuple(found)
    return tuple(token_id for token_id in eos_ids if 0 <= token_id < vocab_size)
