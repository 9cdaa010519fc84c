"""Which drafts of a verify step are accepted, and which token follows them.

Everything has static shapes and reads nothing back to the host, so that it is captured. Knows
nothing of where drafts come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.sampler import Sampled, SamplingPlan, draw, report, sample
from engine.sampling_rows import SamplingTable
from engine.spec_protocol import VerifyChoice, VerifyRows
from graphs.kernels.kernel_set import SampleKernels
from graphs.kernels.sample.reference import (
    SMALL_TOP_K,
    keep_mask,
    philox_words,
    rank_tokens,
    uniform_from_words,
    vocabulary_noise,
)
from graphs.kernels.sample.rows import RowParams

# Of the noise of a seed and output index; stream 0 draws tokens from the target's distribution.
ACCEPT_STREAM = 1
RESIDUAL_STREAM = 2
# Beyond the 32 bits of the noise.
_BISECTIONS = 40


def choose_argmax(
    logits: Tensor,
    rows: VerifyRows,
    table: SamplingTable,
    plan: SamplingPlan,
    kernels: SampleKernels,
) -> VerifyChoice:
    """Sample every row of logits [R * (k + 1), V] as decode would; accept the drafts that match.

    For drafts that are a function of the tokens before them this is exact rejection sampling:
    a draft of probability one is accepted with the target's probability of it, and what is
    sampled instead of it follows the residual. So seeded tokens depend on no draft.
    """
    sampled = sample_verify_rows(logits, rows, table, plan, kernels)
    return VerifyChoice(sampled, accept_argmax(sampled, rows, table))


def choose_synthetic(
    logits: Tensor,
    rows: VerifyRows,
    table: SamplingTable,
    plan: SamplingPlan,
    kernels: SampleKernels,
    mean_committed: float,
) -> VerifyChoice:
    """`choose_argmax`, but drafts are accepted by chance: see `accept_synthetic`."""
    sampled = sample_verify_rows(logits, rows, table, plan, kernels)
    return VerifyChoice(sampled, accept_synthetic(sampled, rows, table, mean_committed))


def choose_sampled(
    logits: Tensor,
    rows: VerifyRows,
    table: SamplingTable,
    plan: SamplingPlan,
    kernels: SampleKernels,
    draft_probs: Tensor,
) -> VerifyChoice:
    """Accept or replace drafts that were drawn from draft_probs [R, k, V] float32.

    The committed tokens have the distribution of plain sampling; unlike with `choose_argmax`,
    seeded ones depend on the drafts. Draws of drafts must be independent of the noise of this
    module and of sampling. Rows without a draft are sampled as decode would.
    """
    if plan.is_all_greedy:
        return choose_argmax(logits, rows, table, plan, kernels)
    params = table.gather(rows.slots)
    scaled, is_bad = kernels.adjust_logits(
        logits,
        rows.slots,
        rows.output_indexes,
        params,
        table.adjustments(),
        has_penalties=plan.has_penalties,
        has_bias=plan.has_bias,
        has_min_tokens=plan.has_min_tokens,
        row_tokens=rows.token_ids.flatten(),
        rows_per_request=rows.token_ids.shape[1],
    )
    plain = draw(scaled, table, params, rows.output_indexes, plan, kernels)
    token_ids, is_accepted = accept_sampled(scaled, plain, rows, table, plan, draft_probs)
    sampled = report(logits, torch.where(is_bad, 0, token_ids), is_bad, plan)
    return VerifyChoice(sampled, count_committed(is_accepted, sampled, rows, table))


def sample_verify_rows(
    logits: Tensor,
    rows: VerifyRows,
    table: SamplingTable,
    plan: SamplingPlan,
    kernels: SampleKernels,
) -> Sampled:
    """A token for every row, as if the drafts before the row had been committed."""
    return sample(
        logits,
        table,
        rows.slots,
        rows.output_indexes,
        plan,
        kernels,
        row_tokens=rows.token_ids.flatten(),
        rows_per_request=rows.token_ids.shape[1],
    )


def accept_argmax(sampled: Sampled, rows: VerifyRows, table: SamplingTable) -> Tensor:
    """How many tokens each request commits, [R] int64, if drafts must equal the sampled tokens."""
    # No sampled token is negative, as NO_DRAFT is.
    is_accepted = sampled.token_ids.view_as(rows.token_ids)[:, :-1] == rows.token_ids[:, 1:]
    return count_committed(is_accepted, sampled, rows, table)


def accept_synthetic(
    sampled: Sampled, rows: VerifyRows, table: SamplingTable, mean_committed: float
) -> Tensor:
    """As `accept_argmax`, each draft accepted by chance, whatever it is; for speed tests.

    A request with k drafts commits `mean_committed` tokens on average, in [1, k + 1], fewer
    where one of them ends it. The noise is a function of seed and output index. The tokens to
    commit are still those sampled, which need not be the drafts that later rows came from.
    """
    acceptance = acceptance_from_mean(mean_committed, rows.token_ids.shape[1] - 1)
    is_draft = rows.token_ids[:, 1:] >= 0
    is_accepted = is_draft & (_accept_uniform(rows, table) < acceptance)
    return count_committed(is_accepted, sampled, rows, table)


def acceptance_from_mean(mean_committed: float, num_drafts: int) -> float:
    """The probability a for which 1 + a + a^2 + .. + a^num_drafts is `mean_committed`."""
    assert 1.0 <= mean_committed <= num_drafts + 1, f"mean of {mean_committed} tokens"
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_low = sum(middle**power for power in range(num_drafts + 1)) < mean_committed
        low, high = (middle, high) if is_low else (low, middle)
    return high


def accept_sampled(
    scaled: Tensor,
    plain: Tensor,
    rows: VerifyRows,
    table: SamplingTable,
    plan: SamplingPlan,
    draft_probs: Tensor,
) -> tuple[Tensor, Tensor]:
    """The token of every row, [R * (k + 1)] int64, and which drafts are accepted, [R, k] bool.

    scaled: [R * (k + 1), V], what `adjust_logits` made. plain: [R * (k + 1)] int64, drawn from
    it. A draft d is accepted with probability min(1, p(d) / q(d)), or else replaced by a token
    of the residual max(p - q, 0), normalised. Leviathan et al., "Fast inference from
    transformers via speculative decoding", 2023; Chen et al., "Accelerating large language
    model decoding with speculative sampling", 2023.
    """
    num_requests, num_rows = rows.token_ids.shape
    vocab_size = scaled.shape[-1]
    drafts = rows.token_ids[:, 1:].flatten()
    slots, positions = (_scored_rows(v, num_rows) for v in (rows.slots, rows.output_indexes))
    params = table.gather(slots)
    p = target_probs(_scored_rows(scaled, num_rows), table.token_ids, params, plan)
    q = draft_probs.reshape(-1, vocab_size)
    wanted = drafts.clamp(min=0)[:, None]
    # Strictly less: a token that the target never draws is never accepted.
    least = _accept_uniform(rows, table).flatten() * q.gather(1, wanted)[:, 0]
    is_accepted = (drafts >= 0) & (least < p.gather(1, wanted)[:, 0])
    residual = (p - q).clamp(min=0.0)
    # Rounding alone may reject where p and q are the same.
    residual = torch.where(residual.amax(-1, keepdim=True) > 0.0, residual, p)
    noise = vocabulary_noise(params.seed, positions, table.token_ids, RESIDUAL_STREAM)
    replacement = (residual.log() + noise).argmax(-1)
    scored_plain = plain.view(num_requests, num_rows)[:, :-1].flatten()
    chosen = torch.where(drafts < 0, scored_plain, torch.where(is_accepted, drafts, replacement))
    last = plain.view(num_requests, num_rows)[:, -1:]
    token_ids = torch.cat([chosen.view(num_requests, num_rows - 1), last], 1)
    return token_ids.flatten(), is_accepted.view(num_requests, num_rows - 1)


def target_probs(
    scaled: Tensor, token_ids: Tensor, params: RowParams, plan: SamplingPlan
) -> Tensor:
    """The distribution that plain sampling draws from, [N, V] float32, each row adding up to 1.

    scaled: [N, V], what `adjust_logits` made. token_ids: [1, V], every token in order. Greedy
    rows have one token, the first of the best.
    """
    vocab_size = scaled.shape[-1]
    weights = scaled.exp()
    if plan.has_truncation:
        num_ranked = min(SMALL_TOP_K, vocab_size) if plan.is_top_k_small else vocab_size
        ranked_ids, ranked = rank_tokens(scaled, num_ranked)
        is_kept = keep_mask(ranked, params.top_k, params.top_p, params.min_p)
        kept = torch.zeros_like(scaled, dtype=torch.bool).scatter(1, ranked_ids, is_kept)
        weights = torch.where(kept, weights, 0.0)
    best = (token_ids == scaled.argmax(-1)[:, None]).float()
    weights = torch.where(params.is_greedy[:, None], best, weights)
    return weights / weights.sum(-1, keepdim=True)


def count_committed(
    is_accepted: Tensor, sampled: Sampled, rows: VerifyRows, table: SamplingTable
) -> Tensor:
    """[R] int64 in 1..k + 1: the leading accepted drafts, is_accepted [R, k], and one token more.

    The run ends with the first token that ends its request by itself, or with a bad row.
    """
    is_over = (sampled.is_bad | _ends_request(sampled, rows, table)).view_as(rows.token_ids)
    goes_on = is_accepted & ~is_over[:, :-1]
    return 1 + goes_on.long().cumprod(-1).sum(-1)


def _ends_request(sampled: Sampled, rows: VerifyRows, table: SamplingTable) -> Tensor:
    """Whether a row's token is EOS or a stop token that counts, [T] bool, as a commit decides."""
    is_masked = (table.masked_ids[rows.slots] == sampled.token_ids[:, None]).any(-1)
    return is_masked & (rows.output_indexes + 1 > table.gather(rows.slots).min_tokens)


def _accept_uniform(rows: VerifyRows, table: SamplingTable) -> Tensor:
    """Uniform values in (0, 1) for each draft, [R, k] float32, of the rows that score them."""
    num_rows = rows.token_ids.shape[1]
    seeds = _scored_rows(table.gather(rows.slots).seed, num_rows)
    positions = _scored_rows(rows.output_indexes, num_rows)
    # The group is read from memory, as `philox_words` asks.
    words = philox_words(seeds, positions, table.token_ids[:, :1], ACCEPT_STREAM)
    return uniform_from_words(words[0]).view(-1, num_rows - 1)


def _scored_rows(values: Tensor, num_rows: int) -> Tensor:
    """Of values [R * num_rows, ...] those of rows that score a draft: all but a request's last."""
    return values.view(-1, num_rows, *values.shape[1:])[:, :-1].flatten(0, 1)
