"""The oracle of MTP drafts: its layer against transformers, its two forms against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.embedded_prompts import EMBEDDED, END_IDS, fresh_prompt_ids
from tests.oracle.mtp_oracle import Draft, MtpOracle, num_right
from tests.oracle.tiny_models import CASES_BY_FAMILY, TinyCase
from tests.oracle.tiny_mtp import save_with_mtp
from tests.tolerances import LOGITS_FP32

NUM_DRAFTS = 4
CASES = [
    pytest.param(family, case, id=f"{family}-{case.name}")
    for family, cases in CASES_BY_FAMILY.items()
    for case in cases
]
MOE_CASES = [case for case in CASES if "moe" in str(case.id)]


def random_ids(case: TinyCase, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(case.vocab, (count,), generator=generator).tolist()


def transformers_rows(oracle: MtpOracle, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The rows after `mtp.norm`, made by the target's own classes of norm and decoder layer."""
    model, tensors = oracle.target.get_decoder(), oracle.layer.tensors
    kinds = model.config.layer_types
    last = max(index for index, kind in enumerate(kinds) if kind == "full_attention")
    layer = type(model.layers[last])(model.config, last)
    prefix = "layers.0."
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer.load_state_dict(own)
    norms = {}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norms[name] = type(model.norm)(hidden.shape[1], model.config.rms_norm_eps)
        norms[name].load_state_dict({"weight": tensors[f"{name}.weight"]})
    both = (norms["pre_fc_norm_embedding"](embedded), norms["pre_fc_norm_hidden"](hidden))
    x = torch.nn.functional.linear(torch.cat(both, -1), tensors["fc.weight"])[None]
    positions = torch.arange(x.shape[1])[None]
    is_seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
    rope = model.rotary_emb(x, positions)
    x = layer.eval()(x, position_embeddings=rope, attention_mask=is_seen)
    return norms["norm"](x[0])


def assert_same(drafts: Sequence[Draft], others: Sequence[Draft]) -> None:
    """Equal up to the first near tie, behind which chains may part."""
    assert len(drafts) == len(others)
    for draft, other in zip(drafts, others, strict=True):
        if draft.margin < 2 * LOGITS_FP32:
            return
        assert draft.token_id == other.token_id
        assert abs(draft.margin - other.margin) < 2 * LOGITS_FP32


@torch.no_grad()
@pytest.mark.parametrize(("family", "case"), CASES)
def test_the_layer_is_that_of_transformers(family: str, case: TinyCase, tmp_path: Path) -> None:
    """V18: embedding, norms, attention, MLP or experts of all pairs of 100 tokens.

    Oracle: norms and decoder layer of transformers with the weights of `mtp.*`.
    """
    save_with_mtp(family, case, tmp_path)
    oracle = MtpOracle(tmp_path)
    ids = random_ids(case, 100)
    hidden, embedded = oracle.hidden_rows(ids[:-1]), oracle.embedding[ids[1:]]
    ours = oracle.layer.forward(embedded, hidden) @ oracle.head.T
    theirs = transformers_rows(oracle, embedded, hidden) @ oracle.head.T
    assert ours.std() > 0.5
    assert (ours - theirs).abs().max() < LOGITS_FP32


@pytest.mark.parametrize(("family", "case"), CASES)
def test_hidden_rows_are_those_behind_the_final_norm(
    family: str, case: TinyCase, tmp_path: Path
) -> None:
    """V18: Oracle: the target's logits, which its head makes of these rows and of no others."""
    save_with_mtp(family, case, tmp_path)
    oracle = MtpOracle(tmp_path)
    ids = random_ids(case, 20)
    logits = oracle.target(torch.tensor([ids])).logits[0]
    assert (oracle.hidden_rows(ids) @ oracle.head.T - logits).abs().max() < LOGITS_FP32


@pytest.mark.parametrize(("family", "case"), CASES)
def test_chains_from_one_run_equal_the_whole_layer_again(
    family: str, case: TinyCase, tmp_path: Path
) -> None:
    """V18: at 40 lengths, with drafts of some variety.

    Oracle: the plain form, which runs the layer over all pairs for each draft.
    """
    save_with_mtp(family, case, tmp_path)
    oracle = MtpOracle(tmp_path)
    ids = random_ids(case, 50)
    along = oracle.drafts_along(ids, NUM_DRAFTS, first_len=11)
    assert list(along) == list(range(11, 51))
    for length in range(11, 51):
        assert_same(along[length], oracle.drafts(ids[:length], NUM_DRAFTS))
    chosen = [draft.token_id for length in range(11, 36) for draft in along[length]]
    assert len(chosen) == 100
    assert len(set(chosen)) >= 20


@pytest.mark.parametrize(("family", "case"), MOE_CASES)
def test_experts_in_one_tensor_or_in_many(family: str, case: TinyCase, tmp_path: Path) -> None:
    """V18: also from a folder of their own. Oracle: the same weights under the other names."""
    folders = {is_stacked: tmp_path / str(is_stacked) for is_stacked in (False, True)}
    for is_stacked, folder in folders.items():
        folder.mkdir()
        save_with_mtp(family, case, folder, is_stacked=is_stacked)
    ids = random_ids(case, 50)
    drafts = MtpOracle(folders[False]).drafts(ids, NUM_DRAFTS)
    assert MtpOracle(folders[True]).drafts(ids, NUM_DRAFTS) == drafts
    assert MtpOracle(folders[False], folders[True]).drafts(ids, NUM_DRAFTS) == drafts


def test_a_count_ends_at_the_first_error() -> None:
    """V18: Oracle: counted by hand."""
    drafts = [Draft(token_id, 1.0) for token_id in (5, 6, 7)]
    assert num_right(drafts, [5, 6, 7, 8]) == 3
    assert num_right(drafts, [5, 6]) == 2
    assert num_right(drafts, [5, 9, 7]) == 1
    assert num_right(drafts, []) == 0


def test_first_drafts_on_the_embedded_model_are_mostly_right() -> None:
    """V18: fresh chats; tied head. Oracle: the target's greedy tokens, by transformers."""
    oracle = MtpOracle(EMBEDDED)
    num_drafts = num_accepted = 0
    for prompt in fresh_prompt_ids(8, seed=1):
        ids = prompt + oracle.continue_greedily(prompt, 32, END_IDS)
        along = oracle.drafts_along(ids[:-1], NUM_DRAFTS, first_len=len(prompt) + 1)
        num_drafts += len(along)
        num_accepted += sum(num_right(drafts, ids[n:]) > 0 for n, drafts in along.items())
        middle = len(prompt) + len(along) // 2 + 1
        assert_same(along[middle], oracle.drafts(ids[:middle], NUM_DRAFTS))
    assert num_drafts > 100
    assert num_accepted > 0.9 * num_drafts
