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
LOWEST_UNIFORM = tl.constexpr(2.0**-33)  # of word 0; its noise is the highest
LOWEST_NOISE = tl.constexpr(-2.82)  # that of MAX_UNIFORM, and a hundredth less


@triton.jit
def philox_words(seed, position, o_group):
    """The four words of Philox4x32-10 as uint32: `tl.philox(seed, o_group, position, 0, 0)`.

    seed, position: int64 scalars. o_group: int32.
    """
    key_a = seed.to(tl.uint32)
    key_b = (seed >> 32).to(tl.uint32)
    word_0 = o_group.to(tl.uint32)
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
    return word_0, word_1, word_2, word_3


@triton.jit
def token_words(seed, position, o_id):
    """The words of any tokens, o_id int32: word t % 4 of group t // 4."""
    word_0, word_1, word_2, word_3 = philox_words(seed, position, o_id >> 2)
    m_odd = (o_id & 1) == 1
    b_low = tl.where(m_odd, word_1, word_0)
    return tl.where((o_id & 2) == 2, tl.where(m_odd, word_3, word_2), b_low)


@triton.jit
def block_words(seed, position, first, BLOCK: tl.constexpr):
    """The words of tokens first .. first + BLOCK - 1; first is a multiple of 4.

    A thread that holds four tokens in a row makes their words itself, in registers.
    """
    o_group = first // 4 + tl.arange(0, BLOCK // 4)
    word_0, word_1, word_2, word_3 = philox_words(seed, position, o_group)
    b_word = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    return tl.reshape(b_word, [BLOCK])


@triton.jit
def uniform_from_words(b_word):
    """32-bit words as float32 in (0, 1), ends excluded."""
    return tl.minimum((b_word.to(tl.float32) + 0.5) * 2.0**-32, MAX_UNIFORM)


@triton.jit
def gumbel_from_uniform(b_uniform):
    """Standard Gumbel noise, float32, always finite.

    Uniform values below 2^-24 vanish in 1 - u; what the logarithm of 1 - u as rounded misses, the
    quotient gives back.
    """
    b_rest = 1.0 - b_uniform
    m_lost = b_rest == 1.0
    b_lost = tl.where(m_lost, 1.0, 1.0 - b_rest)
    b_exponential = tl.where(m_lost, b_uniform, -tl.log(b_rest) * b_uniform / b_lost)
    return -tl.log(b_exponential)


@triton.jit
def gumbel_noise(seed, position, o_id):
    """The noise of the tokens o_id (int32) in a row of int64 scalars seed and position."""
    return gumbel_from_uniform(uniform_from_words(token_words(seed, position, o_id)))
