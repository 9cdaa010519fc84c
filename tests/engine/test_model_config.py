"""Reading config.json: six real geometries, transformers' defaults, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from engine.model_config import LayerKind, ModelConfig, load_model_config, parse_model_config

GEOMETRIES = Path(__file__).parents[2] / "bench" / "geometries"
DENSE = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
QWEN3_5_MOE = {**DENSE, **EXPERTS, "model_type": "qwen3_5_moe_text"}
QWEN3_NEXT = {**DENSE, **EXPERTS, "model_type": "qwen3_next"}
ORACLES = [
    (Qwen3_5TextConfig, DENSE),
    (Qwen3_5MoeTextConfig, QWEN3_5_MOE),
    (Qwen3NextConfig, QWEN3_NEXT),
]


def write_checkpoint(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("name", "layers", "gdn", "heads", "gdn_heads", "ffn", "eos"),
    [
        ("Qwen3-Next-80B-A3B", 48, 36, (16, 2), (16, 32), (512, 10, 512, 512), (151645,)),
        ("Qwen3.5-0.8B", 24, 18, (8, 2), (16, 16), 3584, (248046, 248044)),
        ("Qwen3.5-4B", 32, 24, (16, 4), (16, 32), 9216, (248046, 248044)),
        ("Qwen3.5-9B", 32, 24, (16, 4), (16, 32), 12288, (248046, 248044)),
        ("Qwen3.6-27B", 64, 48, (24, 4), (16, 48), 17408, (248046, 248044)),
        ("Qwen3.6-35B-A3B", 40, 30, (16, 2), (16, 32), (256, 8, 512, 512), (248046, 248044)),
    ],
)
def test_real_geometries(
    name: str,
    layers: int,
    gdn: int,
    heads: tuple[int, int],
    gdn_heads: tuple[int, int],
    ffn: int | tuple[int, int, int, int],
    eos: tuple[int, ...],
) -> None:
    """E1: oracle: the published sizes of six models."""
    config = load_model_config(GEOMETRIES / name)
    assert config.num_layers == layers == len(config.is_moe)
    assert config.layer_kinds.count(LayerKind.GDN) == gdn
    assert config.layer_kinds[3] is LayerKind.ATTENTION
    assert (config.num_q_heads, config.num_kv_heads) == heads
    assert (config.num_k_heads_gdn, config.num_v_heads_gdn) == gdn_heads
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (256, 64, 1e7)
    assert config.conv_dim == (2 * gdn_heads[0] + gdn_heads[1]) * 128
    assert config.eos_token_ids == eos
    assert config.dtype == "bfloat16"
    if isinstance(ffn, int):
        assert not any(config.is_moe)
        assert (config.intermediate_size, config.num_experts) == (ffn, 0)
    else:
        assert all(config.is_moe)
        assert config.intermediate_size == 0
        assert ffn == (
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            config.shared_expert_intermediate_size,
        )


@pytest.mark.parametrize(("oracle_type", "fields"), ORACLES)
def test_agrees_with_transformers(
    oracle_type: type, fields: dict[str, Any], tmp_path: Path
) -> None:
    """E1: oracle: the transformers config of the same fields, saved by transformers."""
    oracle = oracle_type(**fields, rope_theta=5e5, partial_rotary_factor=0.5, eos_token_id=[3, 5])
    oracle.save_pretrained(tmp_path)
    assert_equals_oracle(load_model_config(tmp_path), oracle)


@pytest.mark.parametrize(("oracle_type", "fields"), ORACLES)
@pytest.mark.parametrize(
    "absent",
    [
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "full_attention_interval",
    ],
)
def test_defaults_are_those_of_transformers(
    oracle_type: type, fields: dict[str, Any], absent: str
) -> None:
    """E1: oracle: the transformers config made without the field."""
    rest = {name: value for name, value in fields.items() if name != absent}
    # Any head counts go with the default ones.
    rest |= {"linear_num_value_heads": 16} if absent == "linear_num_key_heads" else {}
    assert_equals_oracle(parse_model_config(rest), oracle_type(**rest))


def assert_equals_oracle(config: ModelConfig, oracle: Any) -> None:
    assert [kind.value for kind in config.layer_kinds] == oracle.layer_types
    assert config.rope_theta == oracle.rope_parameters["rope_theta"]
    fraction = oracle.rope_parameters["partial_rotary_factor"]
    assert config.rotary_dim == int(oracle.head_dim * fraction)
    eos = oracle.eos_token_id if oracle.eos_token_id is not None else []
    assert config.eos_token_ids == tuple(eos)
    names = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.num_k_heads_gdn,
        "linear_num_value_heads": config.num_v_heads_gdn,
        "linear_key_head_dim": config.head_k_dim_gdn,
        "linear_value_head_dim": config.head_v_dim_gdn,
        "linear_conv_kernel_dim": config.conv_kernel,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
    }
    if any(config.is_moe):
        names |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        }
    else:
        names["intermediate_size"] = config.intermediate_size
    assert names == {name: oracle.to_dict()[name] for name in names}


def test_nested_and_flat_give_the_same(tmp_path: Path) -> None:
    """E1: oracle: the flat form of the same fields."""
    nested = {"model_type": "qwen3_5", "text_config": DENSE, "vision_config": {"depth": 2}}
    flat = parse_model_config({**DENSE, "model_type": "qwen3_5"})
    assert load_model_config(write_checkpoint(tmp_path, nested)) == flat
    assert flat.model_type == "qwen3_5"
    assert flat.family == "qwen3_5"


def test_derived_dims() -> None:
    """E1: oracle: the sums written out (2 key heads of 16, 6 value heads of 24)."""
    config = parse_model_config(DENSE)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (32, 144, 208)
    assert config.layer_kinds == (
        LayerKind.GDN,
        LayerKind.ATTENTION,
        LayerKind.GDN,
        LayerKind.ATTENTION,
        LayerKind.GDN,
    )


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(None, None, False), (None, True, True), (True, None, True), (False, True, False)],
)
def test_tied_embeddings_outer_switch_wins(
    outer: bool | None, inner: bool | None, tied: bool
) -> None:
    """E1: oracle: transformers' whole-model class reads the outer switch."""
    text = DENSE if inner is None else {**DENSE, "tie_word_embeddings": inner}
    raw: dict[str, Any] = {"model_type": "qwen3_5", "text_config": text}
    if outer is not None:
        raw["tie_word_embeddings"] = outer
    assert parse_model_config(raw).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("generation", "inner", "outer", "eos"),
    [
        ({"eos_token_id": [7, 8]}, 1, 2, (7, 8)),
        ({"eos_token_id": 7}, [1], None, (7,)),
        ({"do_sample": False}, [1, 2], 3, (1, 2)),
        (None, None, 3, (3,)),
        (None, None, None, ()),
        (None, [96, 97, -1], None, (96,)),
    ],
)
def test_eos_ids(
    generation: object, inner: object, outer: object, eos: tuple[int, ...], tmp_path: Path
) -> None:
    """S2: generation_config.json, then text_config, then the outer field; ids must exist.

    Oracle: the listed ids (the vocabulary has 97).
    """
    raw = {
        "model_type": "qwen3_5",
        "eos_token_id": outer,
        "text_config": {**DENSE, "eos_token_id": inner},
    }
    assert load_model_config(write_checkpoint(tmp_path, raw, generation)).eos_token_ids == eos


def test_qwen3_next_mixes_dense_and_moe_layers() -> None:
    """E1: oracle: which module class transformers puts into each layer."""
    fields = {**QWEN3_NEXT, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    config = parse_model_config(fields)
    # Layers 1 and 3 are the sparse steps, and 3 is listed as dense.
    assert config.is_moe == (False, True, False, False, False)
    assert config.intermediate_size == 80
    dense = parse_model_config({**QWEN3_NEXT, "num_experts": 0})
    assert not any(dense.is_moe)
    assert dense.num_experts_per_tok == 0


@pytest.mark.parametrize(
    ("rope", "theta", "rotary_dim"),
    [
        ({}, 10_000.0, 8),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, 5e5, 16),
        ({"rope_parameters": {"rope_theta": 2e5, "partial_rotary_factor": 1.0}}, 2e5, 32),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 3e5}}, 3e5, 8),
        ({"rope_scaling": {"type": "default", "rope_theta": 4e5}}, 4e5, 8),
    ],
)
def test_rope_fields(rope: dict[str, Any], theta: float, rotary_dim: int) -> None:
    """E1: oracle: transformers' config of the same fields."""
    config = parse_model_config({**DENSE, **rope})
    oracle = Qwen3_5TextConfig(**DENSE, **rope).rope_parameters
    assert (config.rope_theta, config.rotary_dim) == (theta, rotary_dim)
    assert oracle["rope_theta"] == theta
    assert int(32 * oracle["partial_rotary_factor"]) == rotary_dim


@pytest.mark.parametrize(
    ("change", "field", "accepted"),
    [
        ({"model_type": "llama"}, "model_type 'llama'", "qwen3_5_moe_text"),
        ({"hidden_size": "48"}, "hidden_size", "`int`"),
        ({"hidden_size": True}, "hidden_size", "`int`"),
        ({"hidden_size": 0}, "hidden_size", ">= 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "<= 4096"),
        ({"vocab_size": None}, "vocab_size", "`int`"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "> 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim", ">= 2"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"', '"silu"'),
        ({"attention_bias": True}, "attention_bias true", "false"),
        ({"attn_output_gate": False}, "attn_output_gate false", "true"),
        ({"use_sliding_window": True}, "use_sliding_window true", "false"),
        ({"sliding_window": 4096}, "sliding_window 4096", "null"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "bfloat16"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'", "'default'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'", "'default'"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta", "> 0"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters", "all layers"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1", "even number"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "<= 1"),
        ({"layer_types": ["full_attention"]}, "layer_types", "one per layer"),
        (
            {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
            "layer_types[4] 'sliding_attention'",
            "linear_attention, full_attention",
        ),
        ({"num_key_value_heads": 4}, "num_attention_heads (6)", "multiple"),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads (6)", "multiple"),
        ({"dtype": "int8"}, "dtype 'int8'", "float32, bfloat16, float16"),
        ({"eos_token_id": "x"}, "eos_token_id", "`int | array | null`"),
        ({"num_experts": 4}, "num_experts 4", "dense"),
        ({"text_config": DENSE | {"model_type": "qwen3_next"}}, "text_config.model_type", "qwen3"),
        ({"text_config": {"vocab_size": 1.5}}, "text_config", "`int`"),
    ],
)
def test_unsupported_fields_are_named(
    change: dict[str, Any], field: str, accepted: str, tmp_path: Path
) -> None:
    """S2: oracle: the message names the file, the field and what is accepted, in one line."""
    with pytest.raises(ValueError, match=r"config\.json") as caught:
        load_model_config(write_checkpoint(tmp_path, {**DENSE, **change}))
    message = str(caught.value)
    assert field in message
    assert accepted in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("fields", "absent"),
    [
        *((DENSE, name) for name in ("model_type", "vocab_size", "hidden_size")),
        *((DENSE, name) for name in ("num_hidden_layers", "intermediate_size")),
        *((DENSE, name) for name in ("num_attention_heads", "num_key_value_heads")),
        *((QWEN3_5_MOE, name) for name in EXPERTS),
        *((QWEN3_NEXT, name) for name in EXPERTS),
    ],
)
def test_missing_sizes_are_named(fields: dict[str, Any], absent: str) -> None:
    """E1: oracle: the name of the field that was removed."""
    rest = {name: value for name, value in fields.items() if name != absent}
    with pytest.raises(ValueError, match=absent):
        parse_model_config(rest)


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"norm_topk_prob": False},
        {"num_experts": 0},
        {"num_experts_per_tok": 7},
    ],
)
def test_moe_fields_that_the_family_lacks(change: dict[str, Any]) -> None:
    """E1: oracle: qwen3_5_moe has experts in every layer and renormalises always."""
    with pytest.raises(ValueError, match=next(iter(change))):
        parse_model_config({**QWEN3_5_MOE, **change})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"model_type": ', "truncated"),
        (b"[1, 2]", "object"),
        (b'{"model_type": NaN}', "malformed"),
        (b'{"eos_token_id": "\xff"}', "UTF-8"),
        (b'{"a":' * 100_000, "config.json"),
        (b'{"a": "' + b"x" * (4 * 2**20) + b'"}', "larger than"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json_is_one_line(content: bytes, reason: str, name: str, tmp_path: Path) -> None:
    """S2: oracle: a ValueError of one line that names the file."""
    write_checkpoint(tmp_path, DENSE)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason if name == "config.json" else name) as caught:
        load_model_config(tmp_path)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_config_is_named(tmp_path: Path) -> None:
    """S2: oracle: the path in the message."""
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
