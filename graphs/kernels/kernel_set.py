"""The kernels that layers are built with: the torch references, or ours in Triton.

A layer gets its set at construction, by the device it will run on. Both sets have the same
functions with the same arguments; `graphs.kernels.*.reference` says what each one computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from graphs.kernels.attention import ops as attention_ops
from graphs.kernels.attention import reference as attention_reference
from graphs.kernels.gdn import commit as gdn_commit_ops
from graphs.kernels.gdn import decode as gdn_decode_ops
from graphs.kernels.gdn import prefill as gdn_prefill_ops
from graphs.kernels.gdn import reference as gdn_reference
from graphs.kernels.gdn import verify as gdn_verify_ops
from graphs.kernels.gdn import verify_reference as gdn_verify_reference
from graphs.kernels.linear import ops as linear_ops
from graphs.kernels.linear import reference as linear_reference
from graphs.kernels.moe import ops as moe_ops
from graphs.kernels.moe import reference as moe_reference
from graphs.kernels.norm import ops as norm_ops
from graphs.kernels.norm import reference as norm_reference
from graphs.kernels.sample import ops as sample_ops
from graphs.kernels.sample import reference as sample_reference


@dataclass(frozen=True)
class KernelSet:
    """One implementation of everything but attention, whose backend is chosen by itself."""

    linear: Callable[[Tensor, Tensor], Tensor]
    gated_linear: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    gdn_decode: Callable[..., Tensor]
    gdn_prefill: Callable[..., tuple[Tensor, Tensor]]
    gdn_verify: Callable[..., Tensor]
    gdn_commit: Callable[..., None]
    moe_mlp: Callable[..., Tensor]


TORCH_KERNELS = KernelSet(
    linear=linear_reference.linear,
    gated_linear=linear_reference.gated_linear,
    add_rms_norm=norm_reference.add_rms_norm,
    gdn_decode=gdn_reference.gdn_decode,
    gdn_prefill=gdn_reference.gdn_prefill,
    gdn_verify=gdn_verify_reference.gdn_verify,
    gdn_commit=gdn_verify_reference.gdn_commit,
    moe_mlp=moe_reference.moe_mlp,
)
TRITON_KERNELS = KernelSet(
    linear=linear_ops.linear,
    gated_linear=linear_ops.gated_linear,
    add_rms_norm=norm_ops.add_rms_norm,
    gdn_decode=gdn_decode_ops.gdn_decode,
    gdn_prefill=gdn_prefill_ops.gdn_prefill,
    gdn_verify=gdn_verify_ops.gdn_verify,
    gdn_commit=gdn_commit_ops.gdn_commit,
    moe_mlp=moe_ops.moe_mlp,
)


@dataclass(frozen=True)
class AttentionKernels:
    """One implementation of attention over the paged cache."""

    prepare_qkv: Callable[..., Tensor]
    paged_decode_attention: Callable[..., Tensor]
    paged_prefill_attention: Callable[..., Tensor]


TORCH_ATTENTION = AttentionKernels(
    prepare_qkv=attention_reference.prepare_qkv,
    paged_decode_attention=attention_reference.paged_decode_attention,
    paged_prefill_attention=attention_reference.paged_prefill_attention,
)
TRITON_ATTENTION = AttentionKernels(
    prepare_qkv=attention_ops.prepare_qkv,
    paged_decode_attention=attention_ops.paged_decode_attention,
    paged_prefill_attention=attention_ops.paged_prefill_attention,
)


@dataclass(frozen=True)
class SampleKernels:
    """One implementation of choosing tokens."""

    argmax: Callable[[Tensor], tuple[Tensor, Tensor]]
    adjust_logits: Callable[..., tuple[Tensor, Tensor]]
    draw_tokens: Callable[..., Tensor]


def torch_sample(make_noise: sample_reference.NoiseFunction) -> SampleKernels:
    """The reference with `vocabulary_noise` as it is, or compiled."""
    return SampleKernels(
        argmax=sample_reference.argmax,
        adjust_logits=sample_reference.adjust_logits,
        draw_tokens=partial(sample_reference.draw_tokens, make_noise=make_noise),
    )


TORCH_SAMPLE = torch_sample(sample_reference.vocabulary_noise)
TRITON_SAMPLE = SampleKernels(
    argmax=sample_ops.argmax,
    adjust_logits=sample_ops.adjust_logits,
    draw_tokens=sample_ops.draw_tokens,
)
