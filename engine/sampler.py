"""Logits to tokens for a batch of rows, each with its own request's parameters.

The functions are pure, have static shapes and read nothing back to the host, so a runner may
compile them per plan and capture them. Reported log-probabilities are of the raw logits;
penalties, logit bias and the min_tokens mask come after, then temperature, top-k, top-p,
min-p and the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.request import MAX_TOP_LOGPROBS, SamplingParams
from engine.sampling_rows import SamplingTable
from graphs.kernels.kernel_set import TORCH_SAMPLE, SampleKernels
from graphs.kernels.sample.reference import SMALL_TOP_K, rank_tokens
from graphs.kernels.sample.rows import RowParams


@dataclass(frozen=True)
class SamplingPlan:
    """Which work a batch needs; one compiled variant per value.

    A plan that does more than the batch needs gives the same tokens, so a runner may round
    up. `has_truncation`: some row uses top_k, top_p or min_p. `is_top_k_small`: every sampled
    row has a top_k in [1, SMALL_TOP_K]. `num_top_logprobs` None reports no log-probabilities,
    0 those of the chosen tokens, n > 0 also the n likeliest tokens.
    """

    is_all_greedy: bool
    has_penalties: bool
    has_bias: bool
    has_min_tokens: bool
    has_truncation: bool
    is_top_k_small: bool
    num_top_logprobs: int | None

    @property
    def has_adjustments(self) -> bool:
        """Whether some row's logits change before a token is chosen."""
        return self.has_penalties or self.has_bias or self.has_min_tokens


class TokenScores(NamedTuple):
    """Raw log-probabilities, float32: of one token a row, [R], and of the likeliest, [R, n].

    `top_ids` and `top_logprobs` are best first (equal ones by id) and None for n = 0.
    """

    logprobs: Tensor
    top_ids: Tensor | None
    top_logprobs: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> TokenScores:
        """The same fields, each that is there changed."""
        return TokenScores(
            change(self.logprobs),
            None if self.top_ids is None else change(self.top_ids),
            None if self.top_logprobs is None else change(self.top_logprobs),
        )


class Sampled(NamedTuple):
    """What one step chose.

    token_ids: [R] int64. is_bad: [R] bool, the row has NaN, +inf or no token left to choose:
    its token is 0 and means nothing. The rest as in `TokenScores`, None unless planned.
    """

    token_ids: Tensor
    is_bad: Tensor
    logprobs: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


def plan_sampling(params: Sequence[SamplingParams], num_outputs: Sequence[int]) -> SamplingPlan:
    """The plan of a batch whose requests have `num_outputs` output tokens each so far.

    Numbers that lag behind are fine. `num_top_logprobs` is None, 0 or MAX_TOP_LOGPROBS, to
    keep variants few: callers cut to what each request asked for.
    """
    sampled = [row for row in params if not row.is_greedy]
    has_truncation = any(row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0 for row in sampled)
    wanted = [row.logprobs for row in params if row.logprobs is not None]
    return SamplingPlan(
        is_all_greedy=not sampled,
        has_penalties=any(row.has_penalties for row in params),
        has_bias=any(row.logit_bias for row in params),
        has_min_tokens=any(
            count < row.min_tokens for row, count in zip(params, num_outputs, strict=True)
        ),
        has_truncation=has_truncation,
        is_top_k_small=has_truncation and all(1 <= row.top_k <= SMALL_TOP_K for row in sampled),
        num_top_logprobs=None if not wanted else MAX_TOP_LOGPROBS if max(wanted) else 0,
    )


def sample(
    logits: Tensor,
    table: SamplingTable,
    slots: Tensor,
    positions: Tensor,
    plan: SamplingPlan,
    kernels: SampleKernels = TORCH_SAMPLE,
    row_tokens: Tensor | None = None,
    rows_per_request: int = 1,
) -> Sampled:
    """Choose one token for each row.

    logits: [R, V], any float dtype, computed in float32. slots: [R] int64, the row's slot in
    `table`. positions: [R] int64, output index of the token to choose, 0 for the first. A row
    depends on nothing but its own logits, slot and position; with several rows per request, in
    order, also on its request's `row_tokens`, [R] int64, as `reference.adjust_logits` says.
    """
    if plan.is_all_greedy and not plan.has_adjustments:
        token_ids, is_bad = kernels.argmax(logits)
    else:
        rows = table.gather(slots)
        scaled, is_bad = kernels.adjust_logits(
            logits,
            slots,
            positions,
            rows,
            table.adjustments(),
            has_penalties=plan.has_penalties,
            has_bias=plan.has_bias,
            has_min_tokens=plan.has_min_tokens,
            row_tokens=row_tokens,
            rows_per_request=rows_per_request,
        )
        token_ids = draw(scaled, table, rows, positions, plan, kernels)
        token_ids = torch.where(is_bad, 0, token_ids)
    return report(logits, token_ids, is_bad, plan)


def draw(
    scaled: Tensor,
    table: SamplingTable,
    rows: RowParams,
    positions: Tensor,
    plan: SamplingPlan,
    kernels: SampleKernels,
) -> Tensor:
    """The tokens [R] int64 of scores [R, V] that `adjust_logits` made; any where a row is bad."""
    if plan.is_all_greedy:
        return scaled.argmax(-1)
    return kernels.draw_tokens(
        scaled,
        table.token_ids,
        positions,
        rows,
        has_truncation=plan.has_truncation,
        is_top_k_small=plan.is_top_k_small,
    )


def report(logits: Tensor, token_ids: Tensor, is_bad: Tensor, plan: SamplingPlan) -> Sampled:
    """The tokens chosen for rows of logits [R, V], with the log-probabilities that are planned."""
    if plan.num_top_logprobs is None:
        return Sampled(token_ids, is_bad, None, None, None)
    scores = score_tokens(logits, token_ids, plan.num_top_logprobs)
    return Sampled(token_ids, is_bad, *scores)


def score_tokens(logits: Tensor, targets: Tensor, num_top: int) -> TokenScores:
    """Log-probabilities of `targets` [R] and of the `num_top` likeliest tokens of each row.

    logits: [R, V], any float dtype. All values of a row come from one formula: a target that
    is likeliest has exactly the top value.
    """
    raw = logits.float()
    peaks = raw.amax(-1, keepdim=True)
    log_sums = (raw - peaks).exp().sum(-1, keepdim=True).log()
    logprobs = (raw.gather(1, targets[:, None]) - peaks - log_sums)[:, 0]
    if num_top == 0:
        return TokenScores(logprobs, None, None)
    top_ids, top_logits = rank_tokens(raw, min(num_top, raw.shape[-1]))
    return TokenScores(logprobs, top_ids, top_logits - peaks - log_sums)
