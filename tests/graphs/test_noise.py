"""Noise and truncation of graphs/kernels/sample/reference.py against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.kernels.sample.reference import (
    gumbel_noise,
    keep_mask,
    philox_words,
    rank_tokens,
    token_words,
    uniform_from_words,
    vocabulary_noise,
    vocabulary_uniform,
)
from tests.oracle.sampling import Row, chi_square_p, noise_word, philox4x32_10, truncate

MIN_P_VALUE = 0.01

SEEDS = st.integers(-(2**63), 2**63 - 1)
WORDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_oracle_matches_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """E4: the scalar generator is Philox4x32-10. Oracle: Random123's known-answer vectors."""
    assert philox4x32_10(counter, key) == words


def test_first_published_vector() -> None:
    """E4: tokens 0 to 3 get the words in order. Oracle: Random123's vector of zeros alone."""
    zero = torch.zeros(1, dtype=torch.int64)
    published = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [word.item() for word in philox_words(zero, zero, zero[None])] == published
    assert token_words(zero, zero, torch.arange(4)[None]).tolist() == [published]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SEEDS, WORDS), min_size=1, max_size=5), st.lists(WORDS, min_size=1))
def test_words_equal_the_scalar_generator(rows: list[tuple[int, int]], ids: list[int]) -> None:
    """E4: noise bits of any (seed, position, token). Oracle: scalar Python integers."""
    seeds, positions = torch.tensor(rows, dtype=torch.int64).unbind(1)
    words = token_words(seeds, positions, torch.tensor([ids]))
    expected = [[noise_word(seed, pos, token_id) for token_id in ids] for seed, pos in rows]
    assert words.tolist() == expected


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SEEDS, WORDS), min_size=1, max_size=5), st.integers(1, 11))
def test_a_vocabulary_has_the_words_of_its_tokens(
    rows: list[tuple[int, int]], vocab_size: int
) -> None:
    """E4: no multiple of four tokens, or fewer than four. Oracle: scalar Python integers."""
    seeds, positions = torch.tensor(rows, dtype=torch.int64).unbind(1)
    expected = [[noise_word(seed, pos, token) for token in range(vocab_size)] for seed, pos in rows]
    uniform = vocabulary_uniform(seeds, positions, torch.arange(vocab_size)[None])
    assert torch.equal(uniform, uniform_from_words(torch.tensor(expected)))


def test_compiled_words_are_the_same_bits() -> None:
    """E4: no compiler rewrites the integer arithmetic. Oracle: scalar Python integers."""
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), generator=generator)
    positions = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 77])
    ids = torch.arange(70)[None]
    compiled = torch.compile(token_words, fullgraph=True, dynamic=False)
    expected = [
        [noise_word(seed, pos, token_id) for token_id in range(70)]
        for seed, pos in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert compiled(seeds, positions, ids).tolist() == expected
    compiled = torch.compile(vocabulary_uniform, fullgraph=True, dynamic=False)
    uniform = compiled(seeds, positions, ids)
    assert torch.equal(uniform, uniform_from_words(torch.tensor(expected)))


def test_uniform_excludes_its_ends() -> None:
    """E4: noise is finite for every word. Oracle: the extreme words."""
    words = torch.tensor([0, 1, 2**24, 2**32 - 129, 2**32 - 1])
    uniform = uniform_from_words(words)
    assert uniform.dtype == torch.float32
    assert (uniform > 0).all() and (uniform < 1).all()
    assert torch.isfinite(torch.log(-torch.log1p(-uniform))).all()
    expected = torch.tensor([2.0**-33, 1.5 * 2.0**-32, 2.0**-8], dtype=torch.float32)
    assert torch.equal(uniform[:3], expected)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    """E4: Oracle: the same rows alone, permuted and with a larger vocabulary."""
    seeds = torch.tensor([5, -9, 5, 2**62])
    positions = torch.tensor([0, 3, 1, 3])
    ids = torch.arange(130)[None]
    noise = vocabulary_uniform(seeds, positions, ids[:, :99])
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(
        vocabulary_uniform(seeds[order], positions[order], ids[:, :99]), noise[order]
    )
    assert torch.equal(vocabulary_uniform(seeds, positions, ids)[:, :99], noise)
    for index in range(4):
        row = slice(index, index + 1)
        assert torch.equal(vocabulary_uniform(seeds[row], positions[row], ids[:, :99]), noise[row])
    picked = torch.tensor([[7, 98], [0, 1], [3, 3], [50, 2]])
    full = vocabulary_noise(seeds, positions, ids[:, :99])
    assert torch.allclose(gumbel_noise(seeds, positions, picked), full.gather(1, picked))


def test_gumbel_max_draws_from_the_distribution() -> None:
    """E4: 20,000 seeds at one position. Oracle: chi-square against the probabilities."""
    shares = torch.tensor([0.35, 0.2, 0.15, 0.12, 0.1, 0.05, 0.02, 0.0095, 0.0005])
    seeds = torch.arange(20_000)
    noise = vocabulary_noise(seeds, torch.full_like(seeds, 4), torch.arange(9)[None])
    chosen = (shares.log() + noise).argmax(-1)
    counts = torch.bincount(chosen, minlength=9).tolist()
    assert chi_square_p(counts, shares.tolist()) > MIN_P_VALUE


@pytest.mark.parametrize(
    ("seed_step", "position_step", "token_step"),
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 4)],
)
def test_neighbouring_streams_are_independent(
    seed_step: int, position_step: int, token_step: int
) -> None:
    """E4: tokens of one group and of the next too.

    Oracle: chi-square of pairs of noise on an 8 × 8 grid of equal cells.
    """
    seeds, positions = torch.arange(40), torch.full((40,), 6)
    ids = torch.arange(501)[None]
    base = vocabulary_uniform(seeds, positions, ids)
    other = vocabulary_uniform(seeds + seed_step, positions + position_step, ids)
    other = other.roll(token_step, dims=1)
    cells = (base * 8).long() * 8 + (other * 8).long()
    counts = torch.bincount(cells.flatten(), minlength=64).tolist()
    assert chi_square_p(counts, [1 / 64] * 64) > MIN_P_VALUE


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.integers(-6, 6).map(float), st.just(-math.inf)), min_size=1),
    st.integers(1, 40),
)
def test_ranking_is_by_score_then_id(scores: list[float], num_ranked: int) -> None:
    """E4: ties rank by token id, also among the best few. Oracle: Python's sorted."""
    count = min(num_ranked, len(scores))
    expected = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    ids, ranked = rank_tokens(torch.tensor([scores]), count)
    assert ids.tolist() == [expected[:count]]
    assert ranked.tolist() == [[scores[token_id] for token_id in expected[:count]]]


def test_ranking_takes_negative_zero_for_zero() -> None:
    """E4: Oracle: -0.0 == 0.0, so the ids decide."""
    ids, _ = rank_tokens(torch.tensor([[-1.0, -0.0, 0.0]]), 3)
    assert ids.tolist() == [[1, 2, 0]]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(-80, 40).map(lambda eighths: eighths / 8), min_size=1, max_size=40),
    st.integers(0, 45),
    st.one_of(st.just(1.0), st.just(1e-50), st.floats(0.01, 1.0)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
)
def test_truncation_keeps_the_exact_set(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    """E4: top-k, top-p and min-p in every mix. Oracle: sorted float64 sums."""
    peak = max(logits)
    scaled = [value - peak for value in logits]
    filtered = truncate(scaled, Row(top_k=top_k, top_p=top_p, min_p=min_p))
    ranked_ids, ranked = rank_tokens(torch.tensor([scaled]), len(scaled))
    is_kept = keep_mask(
        ranked,
        torch.tensor([top_k if 0 < top_k <= len(scaled) else len(scaled)]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    kept = set(ranked_ids[is_kept].tolist())
    assert kept ^ set(filtered.kept) <= filtered.doubtful
    assert ranked_ids[0, 0].item() in kept


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.5625, 3), (0.75, 3), (1.0, 6)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, num_kept: int) -> None:
    """E4: exact boundaries, and off keeps the smallest tail. Oracle: quarters, summed by hand."""
    ranked = torch.tensor([[0.0, 0.0, 0.0, 0.0, -60.0, -90.0]])
    off = torch.tensor([6]), torch.tensor([0.0])
    is_kept = keep_mask(ranked, off[0], torch.tensor([top_p]), off[1])
    assert is_kept.tolist() == [[index < num_kept for index in range(6)]]


@pytest.mark.parametrize(("top_k", "num_kept"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_top_p_is_a_share_of_what_top_k_left(top_k: int, num_kept: int) -> None:
    """E4: Oracle: half of top_k equal tokens, rounded up."""
    ranked, half = torch.zeros(1, 12), torch.tensor([0.5])
    is_kept = keep_mask(ranked, torch.tensor([top_k]), half, torch.zeros(1))
    assert is_kept.sum().item() == num_kept


def test_truncation_of_a_large_vocabulary_is_the_same_for_any_batch() -> None:
    """E4: mass is summed exactly. Oracle: the same row in batches of 1 and 5."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 50_000, generator=generator) * 3
    ranked = (scores - scores.amax(-1, keepdim=True)).sort(-1, descending=True).values
    top_k = torch.full((5,), 50_000)
    top_p, min_p = torch.full((5,), 0.9), torch.zeros(5)
    is_kept = keep_mask(ranked, top_k, top_p, min_p)
    shares = ranked.double().softmax(-1).cumsum(-1)
    expected = 1 + (shares < top_p[:, None].double()).sum(-1)
    assert torch.equal(is_kept.sum(-1), expected)
    for index in range(5):
        row = slice(index, index + 1)
        alone = keep_mask(ranked[row], top_k[row], top_p[row], min_p[row])
        assert torch.equal(alone, is_kept[row])
