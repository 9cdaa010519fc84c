"""Drafts of the model's own layer: those of an independent oracle, whatever the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import LLM, SamplingParams
from engine.client import EngineStats
from engine.memory import DraftMemory
from engine.model_config import ModelConfig, load_model_config
from engine.spec_protocol import DraftRequest, DraftRows, SpecSettings
from spec.mtp.proposer import MtpProposer
from spec.runner import build_runtime
from tests.embedded_prompts import EMBEDDED, fresh_prompt_ids
from tests.oracle.mtp_oracle import MtpOracle
from tests.oracle.tiny_models import DENSE_CASES, MOE_CASES, TinyCase, build_oracle
from tests.oracle.tiny_mtp import save_with_mtp
from tests.spec.verify_contract import make_prompts

NUM_DRAFTS = 4
NUM_TOKENS = 40
# Tokens that follow a decode step of the embedded model, each of eight requests.
NUM_PROMPTS = 8


Drafts = dict[tuple[int, ...], dict[int, list[int]]]  # by prompt, and number of tokens so far


class NotingMtp(MtpProposer):
    """Notes the drafts of each request and step."""

    drafts: ClassVar[Drafts] = {}

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        super().__init__(settings, model)
        self.prompts: dict[int, tuple[int, ...]] = {}

    def finish_prefill(self, request: DraftRequest) -> None:
        self.prompts[request.slot] = tuple(request.prompt_token_ids)

    def draft(self, rows: DraftRows) -> Tensor:
        made = super().draft(rows)
        per_request = rows.slots.tolist(), rows.positions.tolist(), made.tolist()
        for slot, position, drafts in zip(*per_request, strict=True):
            if slot in self.prompts:
                noted = self.drafts.setdefault(self.prompts[slot], {})
                noted[position + 1] = drafts
        return made


@dataclass(frozen=True)
class Run:
    """Greedy outputs, and with mtp the drafts that led to them."""

    outputs: list[list[int]]
    drafts: Drafts
    stats: EngineStats


def run(folder: Path, prompts: Sequence[list[int]], **options: object) -> Run:
    """All prompts at once through an uncompiled engine, greedy unless the options say else."""
    NotingMtp.drafts.clear()
    params = options.pop("params", SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    settings: dict[str, object] = {
        "device": "cpu",
        "compile": "off",
        "num_threads": 1,
        "check_integrity": "on",
        "max_running_requests": 8,
        "max_kv_tokens": 4096,
    }
    with LLM(str(folder), **(settings | options)) as llm:  # type: ignore[arg-type]
        results = llm.generate(list(prompts), params)  # type: ignore[arg-type]
        outputs = [result.outputs[0].token_ids for result in results]
        return Run(outputs, dict(NotingMtp.drafts), llm.stats())


def with_mtp(num_drafts: int = NUM_DRAFTS, **options: object) -> dict[str, object]:
    """The options that draft by NotingMtp, and others."""
    algorithm = f"{__name__}:{NotingMtp.__name__}"
    return {"speculative_algorithm": algorithm, "speculative_num_steps": num_drafts} | options


def check_drafts(oracle: MtpOracle, prompts: Sequence[list[int]], noted: Run) -> int:
    """Compare all drafts of the run's steps with the oracle's; how many there were."""
    num_compared = 0
    for prompt, output in zip(prompts, noted.outputs, strict=True):
        tokens = prompt + output
        along = oracle.drafts_along(tokens, NUM_DRAFTS, first_len=len(prompt) + 1)
        for num_tokens, drafts in noted.drafts[tuple(prompt)].items():
            if num_tokens <= len(tokens):  # a step may begin past a token that ends the request
                assert drafts == [draft.token_id for draft in along[num_tokens]]
                num_compared += len(drafts)
    return num_compared


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_prefill_tokens": 16}, id="prompts-in-pieces"),
        pytest.param({"max_kv_tokens": 320, "page_size": 8}, id="preempted"),
    ],
)
def test_drafts_are_those_of_the_oracle(options: dict[str, object]) -> None:
    """V18 `mtp`: first drafts and chained ones, in mixed batches, over pages, after a preemption.

    Oracle: the layer in plain torch on transformers' hidden states, pair by pair.
    """
    prompts = fresh_prompt_ids(NUM_PROMPTS, seed=1)
    noted = run(EMBEDDED, prompts, **with_mtp(**options))
    assert len({token for output in noted.outputs for token in output}) >= 50
    assert (noted.stats.num_preemptions_total > 0) == ("page_size" in options)
    assert check_drafts(MtpOracle(EMBEDDED), prompts, noted) > 200
    assert noted.stats.num_accepted_tokens_total > 100


@pytest.mark.parametrize(
    ("family", "case", "is_stacked"),
    [
        pytest.param("qwen3_5_text", DENSE_CASES[0], False, id="dense"),
        pytest.param("qwen3_5_text", DENSE_CASES[2], False, id="dense-tied"),
        pytest.param("qwen3_next", MOE_CASES[0], False, id="moe"),
        pytest.param("qwen3_5_moe_text", MOE_CASES[0], True, id="moe-stacked"),
    ],
)
def test_every_kind_of_layer_loads_by_name(
    family: str, case: TinyCase, is_stacked: bool, tmp_path: Path
) -> None:
    """V18: dense and MoE layers. Oracle: drafts of the plain layer; outputs without drafts."""
    save_with_mtp(family, case, tmp_path, is_stacked=is_stacked)
    prompts = make_prompts(case.vocab, (3, 9, 17))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    noted = run(tmp_path, prompts, params=params, **with_mtp())
    assert check_drafts(MtpOracle(tmp_path), prompts, noted) > 100
    assert noted.outputs == run(tmp_path, prompts, params=params).outputs


@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS), id="greedy"),
        pytest.param(
            SamplingParams(
                temperature=0.8, top_p=0.95, seed=3, frequency_penalty=0.4, max_tokens=NUM_TOKENS
            ),
            id="sampled",
        ),
    ],
)
def test_drafts_change_no_token(num_drafts: int, params: SamplingParams) -> None:
    """V13, V7: any number of drafts, greedy and by a seed. Oracle: the engine without drafts."""
    prompts = fresh_prompt_ids(NUM_PROMPTS, seed=2)
    noted = run(EMBEDDED, prompts, params=params, **with_mtp(num_drafts))
    assert noted.stats.num_accepted_tokens_total > 50
    assert noted.outputs == run(EMBEDDED, prompts, params=params).outputs


def test_the_layer_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Issue 6: --speculative-draft-model-path. Oracle: drafts of the layer beside its target."""
    target, layer = tmp_path / "target", tmp_path / "layer"
    save_with_mtp("qwen3_5_text", DENSE_CASES[0], target)
    layer.mkdir()
    weights = load_file(target / "model.safetensors")
    of_layer = {name: tensor for name, tensor in weights.items() if name.startswith("mtp.")}
    save_file(of_layer, layer / "model.safetensors")
    prompts = make_prompts(DENSE_CASES[0].vocab, (5, 9))
    beside = run(target, prompts, **with_mtp())
    save_file({n: t for n, t in weights.items() if n not in of_layer}, target / "model.safetensors")
    apart = run(target, prompts, **with_mtp(speculative_draft_model_path=str(layer)))
    assert apart.outputs == beside.outputs and apart.drafts == beside.drafts


def test_a_target_without_the_layer_is_refused(tmp_path: Path) -> None:
    """C-L7: by its config, by its tensors, by a folder that is none. Oracle: the messages."""
    build_oracle("qwen3_5_text", DENSE_CASES[0]).save_pretrained(tmp_path / "none")
    with pytest.raises(ValueError, match=r"has no such layer .*speculative-draft-model-path"):
        run(tmp_path / "none", [[1]], speculative_algorithm="mtp")
    save_with_mtp("qwen3_5_text", DENSE_CASES[0], tmp_path / "some")
    file = tmp_path / "some" / "model.safetensors"
    weights = load_file(file)
    without_norm = {n: t for n, t in weights.items() if n != "mtp.norm.weight"}
    save_file(without_norm, file)
    with pytest.raises(ValueError, match=r"lacks .*mtp\.norm\.weight"):
        run(tmp_path / "some", [[1]], speculative_algorithm="mtp")
    save_file({n: t for n, t in weights.items() if not n.startswith("mtp.")}, file)
    with pytest.raises(ValueError, match=r"has no tensors mtp\.\*; name a folder"):
        run(tmp_path / "some", [[1]], speculative_algorithm="mtp")
    options = {"speculative_draft_model_path": str(tmp_path / "nowhere")}
    with pytest.raises(ValueError, match=r"nowhere' is not a folder"):
        run(tmp_path / "some", [[1]], speculative_algorithm="mtp", **options)


def test_the_plan_has_room_for_the_layer() -> None:
    """V15: weights, keys, values, hidden states. Oracle: the checkpoint's tensors, its shapes."""
    runtime = build_runtime(SpecSettings("mtp", num_drafts=3), load_model_config(EMBEDDED))
    weights = [load_file(file) for file in EMBEDDED.glob("*.safetensors")]
    layer = [t for part in weights for name, t in part.items() if name.startswith("mtp.")]
    assert runtime.memory == DraftMemory(
        num_weights=sum(tensor.numel() for tensor in layer),
        kv_values_per_token=2 * 2 * 128,
        values_per_slot=4 * 256,
        rows_per_request=4,
    )
