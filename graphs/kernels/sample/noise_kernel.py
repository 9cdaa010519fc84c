# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Gumbel noise of tokens, computed where it is needed: the words are those of the reference."""

import triton
import triton.language as tl

MULTIPLIER_A = tl.constexpr(0xD2511F53)
MULTIPLIER_B = tl.constexpr(0xCD9E8D57)
KEY_STEP_A = tl.constexpr(0x9E3779B9)
KEY_STEP_B = tl.constexpr(0xBB67AE85)
NUM_ROUNDS = tl.constexpr(10)
MAX_UNIFORM = tl.constexpr(1.0 - 2.0**-24)  # largest float32 below 1


@triton.jit
def philox_words(seed, position, o_id):
    """The first word of Philox4x32-10 as uint32: `tl.philox(seed, o_id, position, 0, 0)`.

    seed, position: int64 scalars. o_id: int32.
    """
    key_a = seed.to(tl.uint32)
    key_b = (seed >> 32).to(tl.uint32)
    word_0 = o_id.to(tl.uint32)
    word_1 = position.to(tl.uint32)
    word_2 = tl.zeros_like(word_0)
    word_3 = tl.zeros_like(word_0)
    for _ in tl.static_range(NUM_ROUNDS):
        # Both halves of a product come from one instruction.
        product_a = word_0.to(tl.uint64) * MULTIPLIER_A
        product_b = word_2.to(tl.uint64) * MULTIPLIER_B
        word_0 = (product_b >> 32).to(tl.uint32) ^ word_1 ^ key_a
        word_2 = (product_a >> 32).to(tl.uint32) ^ word_3 ^ key_b
        word_1 = product_b.to(tl.uint32)
        word_3 = product_a.to(tl.uint32)
        key_a += KEY_STEP_A
        key_b += KEY_STEP_B
    return word_0


@triton.jit
def gumbel_from_words(b_word):
    """Standard Gumbel noise from 32-bit words, float32, always finite.

    Uniform values below 2^-24 vanish in 1 - u; what the logarithm of 1 - u as rounded misses, the
    quotient gives back.
    """
    b_uniform = tl.minimum((b_word.to(tl.float32) + 0.5) * 2.0**-32, MAX_UNIFORM)
    b_rest = 1.0 - b_uniform
    m_lost = b_rest == 1.0
    b_lost = tl.where(m_lost, 1.0, 1.0 - b_rest)
    b_exponential = tl.where(m_lost, b_uniform, -tl.log(b_rest) * b_uniform / b_lost)
    return -tl.log(b_exponential)


@triton.jit
def gumbel_noise(seed, position, o_id):
    """The noise of the tokens o_id (int32) in a row of int64 scalars seed and position."""
    return gumbel_from_words(philox_words(seed, position, o_id))
