# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"
"""Router logits, and the choice of each row's experts.

Logits are partial sums over splits of the hidden dim, [SPLITS, T, LOGITS_STRIDE] fp32; column
NUM_EXPERTS is the logit of the shared expert's gate. They are never rounded to the model dtype.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # ranks below every logit


@triton.jit
def router_logits_kernel(
    x_ptr,
    router_ptr,
    gate_ptr,
    logits_ptr,
    num_rows,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M rows, one split, BLOCK_N experts or (last block) the shared gate."""
    EXPERT_BLOCKS: tl.constexpr = (NUM_EXPERTS + BLOCK_N - 1) // BLOCK_N
    i_n = tl.program_id(0) % (EXPERT_BLOCKS + 1)
    i_m = tl.program_id(0) // (EXPERT_BLOCKS + 1) // SPLITS
    i_split = tl.program_id(0) // (EXPERT_BLOCKS + 1) % SPLITS
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    o_n = tl.arange(0, BLOCK_N)
    m_m = o_m < num_rows
    if i_n == EXPERT_BLOCKS:
        p_block = gate_ptr
        num_n = 1
        first_column = NUM_EXPERTS
    else:
        p_block = router_ptr + i_n * BLOCK_N * HIDDEN
        num_n = tl.minimum(NUM_EXPERTS - i_n * BLOCK_N, BLOCK_N)
        first_column = i_n * BLOCK_N
    m_n = o_n < num_n
    first_k = i_split * SPLIT_SIZE
    p_x = x_ptr + o_m[:, None].to(tl.int64) * HIDDEN + first_k + o_k[None, :]
    p_w = p_block + o_n[:, None] * HIDDEN + first_k + o_k[None, :]
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, SPLIT_SIZE, BLOCK_K):
        if HIDDEN == SPLITS * SPLIT_SIZE and SPLIT_SIZE % BLOCK_K == 0:
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
            b_w = tl.load(p_w + k, mask=m_n[:, None], other=0.0)
        else:
            m_k = (k + o_k < SPLIT_SIZE) & (first_k + k + o_k < HIDDEN)
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_w = tl.load(p_w + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_sum = tl.dot(b_x, tl.trans(b_w), b_sum, input_precision="ieee")
    o_row = i_split.to(tl.int64) * num_rows + o_m
    p_logits = logits_ptr + o_row[:, None] * LOGITS_STRIDE + first_column + o_n[None, :]
    tl.store(p_logits, b_sum, mask=m_m[:, None] & m_n[None, :])


@triton.jit
def load_ranking_keys(
    p_logits,
    m_rows,
    split_stride,
    NUM_EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
):
    """Logits, and int32 keys of the same order, of the rows that p_logits [ROWS] points to.

    Both [ROWS, EXPERTS_PADDED]; the keys of the padding are LOWEST, those of NaN LOWEST + 1.
    """
    o_e = tl.arange(0, EXPERTS_PADDED)
    m_e = m_rows[:, None] & (o_e < NUM_EXPERTS)[None, :]
    b_logits = tl.zeros([ROWS, EXPERTS_PADDED], tl.float32)
    for split in tl.static_range(SPLITS):
        p_split = p_logits[:, None] + split * split_stride + o_e[None, :]
        b_logits += tl.load(p_split, mask=m_e, other=0.0)
    # Negative floats flip their magnitude (a sum that starts from 0.0 is never -0.0). NaN comes
    # last, but before what is already chosen, so that ids stay distinct and valid.
    b_bits = b_logits.to(tl.int32, bitcast=True)
    b_keys = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_keys = tl.where(b_logits == b_logits, b_keys, LOWEST + 1)
    return b_logits, tl.where((o_e < NUM_EXPERTS)[None, :], b_keys, LOWEST)


@triton.jit
def find_expert(b_keys, rank, EXPERTS_PADDED: tl.constexpr):
    """The expert of one rank, 0 the best, by keys [1, EXPERTS_PADDED]; equal keys by id."""
    o_e = tl.arange(0, EXPERTS_PADDED)[None, :]
    i_expert = tl.full([], 0, tl.int32)
    for _ in range(rank + 1):
        i_expert = tl.min(tl.where(b_keys == tl.max(b_keys), o_e, EXPERTS_PADDED))
        b_keys = tl.where(o_e == i_expert, LOWEST, b_keys)
    return i_expert


@triton.jit
def select_experts(
    p_logits,
    m_rows,
    split_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
):
    """Each row's TOP_K largest logits, best first, equal ones by expert id.

    p_logits: pointers to the rows' logits, [ROWS]. Returns ids int32 and softmax weights fp32,
    [ROWS, SLOTS_PADDED], meaningless from slot TOP_K on, and the logits' ranking keys
    [ROWS, EXPERTS_PADDED], in which the chosen experts (and the padding) are LOWEST.
    """
    o_e = tl.arange(0, EXPERTS_PADDED)
    o_slot = tl.arange(0, SLOTS_PADDED)
    b_logits, b_keys = load_ranking_keys(
        p_logits, m_rows, split_stride, NUM_EXPERTS, SPLITS, ROWS, EXPERTS_PADDED
    )
    b_ids = tl.zeros([ROWS, SLOTS_PADDED], tl.int32)
    b_top_keys = tl.zeros([ROWS, SLOTS_PADDED], tl.int32)
    for slot in range(TOP_K):
        b_best = tl.max(b_keys, 1)
        b_id = tl.min(tl.where(b_keys == b_best[:, None], o_e[None, :], EXPERTS_PADDED), 1)
        b_ids = tl.where((o_slot == slot)[None, :], b_id[:, None], b_ids)
        b_top_keys = tl.where((o_slot == slot)[None, :], b_best[:, None], b_top_keys)
        b_keys = tl.where(o_e[None, :] == b_id[:, None], LOWEST, b_keys)
    b_top = (b_top_keys ^ ((b_top_keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    b_peak = tl.sum(tl.where((o_slot == 0)[None, :], b_top, 0.0), 1)
    b_weights = tl.where((o_slot < TOP_K)[None, :], tl.exp(b_top - b_peak[:, None]), 0.0)
    if RENORMALISE:
        b_total = tl.sum(b_weights, 1)
    else:
        b_exp = tl.exp(b_logits - b_peak[:, None])
        b_total = tl.sum(tl.where((o_e < NUM_EXPERTS)[None, :], b_exp, 0.0), 1)
    return b_ids, b_weights / b_total[:, None], b_keys


@triton.jit
def load_shared_weight(
    p_logits, mask, split_stride, NUM_EXPERTS: tl.constexpr, SPLITS: tl.constexpr
):
    """The shared expert's weight of the rows whose logits p_logits points to."""
    b_gate = tl.load(p_logits + NUM_EXPERTS, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        b_gate += tl.load(p_logits + split * split_stride + NUM_EXPERTS, mask=mask, other=0.0)
    return tl.sigmoid(b_gate)


@triton.jit
def route_kernel(
    logits_ptr,
    weights_ptr,
    ids_ptr,
    ranks_ptr,
    counts_ptr,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
):
    """ROWS rows: weights and ids [T, NUM_SLOTS]; slot TOP_K, if any, is the shared expert.

    For grouping: counts [programs, NUM_EXPERTS], how often these rows chose an expert, and
    ranks [T, NUM_SLOTS], how many earlier rows of the program chose the same (not for slot TOP_K).
    """
    i_chunk = tl.program_id(0)
    o_row = i_chunk * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, EXPERTS_PADDED)
    o_slot = tl.arange(0, SLOTS_PADDED)
    m_row = o_row < num_rows
    split_stride = num_rows * LOGITS_STRIDE
    p_logits = logits_ptr + o_row.to(tl.int64) * LOGITS_STRIDE
    b_ids, b_weights, b_keys = select_experts(
        p_logits,
        m_row,
        split_stride,
        NUM_EXPERTS,
        TOP_K,
        RENORMALISE,
        SPLITS,
        ROWS,
        EXPERTS_PADDED,
        SLOTS_PADDED,
    )
    if NUM_SLOTS > TOP_K:
        b_shared = load_shared_weight(p_logits, m_row, split_stride, NUM_EXPERTS, SPLITS)
        b_weights = tl.where((o_slot == TOP_K)[None, :], b_shared[:, None], b_weights)
        b_ids = tl.where((o_slot == TOP_K)[None, :], NUM_EXPERTS, b_ids)
    o_pair = o_row[:, None].to(tl.int64) * NUM_SLOTS + o_slot[None, :]
    m_pair = m_row[:, None] & (o_slot < NUM_SLOTS)[None, :]
    tl.store(weights_ptr + o_pair, b_weights, mask=m_pair)
    tl.store(ids_ptr + o_pair, b_ids, mask=m_pair)
    m_e = o_e < NUM_EXPERTS
    b_chosen = ((b_keys == LOWEST) & m_e[None, :] & m_row[:, None]).to(tl.int32)
    tl.store(counts_ptr + i_chunk * NUM_EXPERTS + o_e, tl.sum(b_chosen, 0), mask=m_e)
    b_before = tl.cumsum(b_chosen, 0) - b_chosen
    b_looked_up = tl.where((o_slot < TOP_K)[None, :], b_ids, 0)
    tl.store(ranks_ptr + o_pair, tl.gather(b_before, b_looked_up, 1), mask=m_pair)
