"""The fields of a checkpoint's config.json: names, types, and which values are accepted."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

# Upper bounds keep a hostile file from asking for absurd amounts of memory.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
# A conv of one tap looks at no other row: there would be no window to keep.
TapCount = Annotated[int, msgspec.Meta(ge=2, le=64)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
TokenIds = int | list[int] | None

DTYPES = ("float32", "bfloat16", "float16")


class OuterFields(msgspec.Struct, frozen=True):
    """The fields that may stand beside a nested `text_config`."""

    model_type: str
    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: Any = None


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """The text model's fields.

    What has no default must be there. A default here is the one that transformers gives to
    the field in every family; sizes whose default there differs by family have none.
    """

    model_type: str | None = None
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: LayerCount
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    max_position_embeddings: Length = 32768
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool | None = None
    eos_token_id: TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None
    mtp_num_hidden_layers: CountOrZero = 0

    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count = 256
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: Fraction = 0.25

    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_conv_kernel_dim: TapCount = 4

    intermediate_size: Count | None = None
    num_experts: CountOrZero | None = None
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None
    shared_expert_intermediate_size: Count | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: list[int] | None = None
    decoder_sparse_step: Count = 1

    hidden_act: str = "silu"
    attention_bias: bool = False
    attn_output_gate: bool = True
    use_sliding_window: bool | None = None
    sliding_window: int | None = None
    quantization_config: Any = None


class RopeFields(msgspec.Struct, frozen=True):
    """`rope_parameters`, or `rope_scaling` in older files."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Fraction | None = None


class GenerationFields(msgspec.Struct, frozen=True):
    """What generation_config.json adds."""

    eos_token_id: TokenIds = None


def check_switches(outer: OuterFields, text: TextFields) -> None:
    """Refuse what would change the computation and is not implemented."""
    if outer.quantization_config is not None or text.quantization_config is not None:
        raise ValueError(
            "quantization_config: quantized checkpoints are not supported yet; accepted are "
            f"weights in {', '.join(DTYPES)}"
        )
    for field, value, accepted in (
        ("hidden_act", text.hidden_act, "silu"),
        ("attention_bias", text.attention_bias, False),
        ("attn_output_gate", text.attn_output_gate, True),
        ("use_sliding_window", bool(text.use_sliding_window), False),
    ):
        if value != accepted:
            shown, wanted = (msgspec.json.encode(each).decode() for each in (value, accepted))
            raise ValueError(f"{field} {shown} is not supported; accepted is {wanted}")
    if text.sliding_window is not None and text.use_sliding_window is None:
        raise ValueError(f"sliding_window {text.sliding_window} is not supported; accepted is null")


def check_heads(text: TextFields) -> None:
    """Raises ValueError unless query heads divide evenly over their key heads."""
    for field, num_heads, shared_field, num_shared in (
        (
            "num_attention_heads",
            text.num_attention_heads,
            "num_key_value_heads",
            text.num_key_value_heads,
        ),
        (
            "linear_num_value_heads",
            text.linear_num_value_heads,
            "linear_num_key_heads",
            text.linear_num_key_heads,
        ),
    ):
        if num_heads % num_shared:
            raise ValueError(
                f"{field} ({num_heads}) must be a multiple of {shared_field} ({num_shared})"
            )


def find_rope(text: TextFields) -> tuple[float, int]:
    """rope_theta and the number of rotating dims; only plain rotary embedding is accepted."""
    found = text.rope_scaling or text.rope_parameters or {}
    if any(isinstance(value, dict) for value in found.values()):
        raise ValueError("rope_parameters must be one set for all layers, not one per layer type")
    try:
        rope = msgspec.convert(found, RopeFields)
    except msgspec.ValidationError as error:
        raise ValueError(f"rope_parameters: {error}") from error
    rope_type = rope.rope_type or rope.type or "default"
    if rope_type != "default":
        raise ValueError(f"rope_type {rope_type!r} is not supported; accepted is 'default'")
    fraction = rope.partial_rotary_factor or text.partial_rotary_factor
    rotary_dim = int(text.head_dim * fraction)
    if rotary_dim == 0 or rotary_dim % 2:
        raise ValueError(
            f"partial_rotary_factor {fraction} of head_dim {text.head_dim} gives {rotary_dim} "
            "rotating dims; accepted is an even number above 0"
        )
    return rope.rope_theta or text.rope_theta, rotary_dim
