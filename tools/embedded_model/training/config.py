"""The shape of the model and the settings of a training run."""

from dataclasses import dataclass
from typing import Any, Self

from tools.embedded_model.tokenizer import NUM_ADDED_TOKENS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model, under the names of the checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    full_attention_interval: int = 4
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def is_full_attention(self, layer: int) -> bool:
        """Whether a layer attends; the others have a recurrent state."""
        return (layer + 1) % self.full_attention_interval == 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read the fields from a parsed config.json."""
        flat = {**data, **data["rope_parameters"]}
        return cls(**{name: flat[name] for name in cls.__dataclass_fields__})

    def to_json(self) -> dict[str, Any]:
        """Build the config.json that model loaders expect."""
        fields = dict(self.__dict__)
        theta, rotary_factor = fields.pop("rope_theta"), fields.pop("partial_rotary_factor")
        first_added_id = self.vocab_size - NUM_ADDED_TOKENS
        layer_types = [
            "full_attention" if self.is_full_attention(layer) else "linear_attention"
            for layer in range(self.num_hidden_layers)
        ]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **fields,
            "layer_types": layer_types,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": rotary_factor,
            },
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mtp_num_hidden_layers": 1,
            "eos_token_id": first_added_id + 2,
            "bos_token_id": None,
            "pad_token_id": first_added_id,
            "dtype": "bfloat16",
            "mamba_ssm_dtype": "float32",
        }


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run. A row is `row_len` tokens and what the draft steps look ahead."""

    row_len: int
    num_rows: int
    muon_lr: float = 0.02
    adam_lr: float
    num_workers: int
    synthetic_share: float
    num_draft_steps: int = 4
    # Draft steps after the first see one row in this many.
    deep_draft_divisor: int


PRESETS = {
    "gpu": (
        ModelConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
        TrainConfig(
            row_len=1024,
            num_rows=128,
            adam_lr=0.003,
            num_workers=12,
            synthetic_share=0.65,
            deep_draft_divisor=4,
        ),
    ),
    "cpu": (
        ModelConfig(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
        TrainConfig(
            row_len=192,
            num_rows=24,
            adam_lr=0.006,
            num_workers=0,
            synthetic_share=0.9,
            deep_draft_divisor=2,
        ),
    ),
}
