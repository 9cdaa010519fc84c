"""V1, V15, V16: what speculation decides and refuses before anything large is allocated."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.attention.choice import SplitAttention, build_backend
from engine.attention.paged import TORCH_PAGED, TRITON_PAGED
from engine.attention.protocol import RowCapabilities
from engine.config import EngineConfig
from engine.device_facts import DeviceFacts
from engine.layers.gdn import GdnMixer
from engine.memory import DraftMemory
from engine.model_config import load_model_config
from engine.plan import Plan, check_options, make_plan
from engine.spec_plan import check_verify_layers, choose_speculation
from engine.spec_protocol import SpecSettings
from engine.start import meta_model

FOLDER = Path(__file__).parents[2] / "bench" / "geometries" / "Qwen3.5-0.8B"
CPU = DeviceFacts(torch.device("cpu"), "cpu", 2**36)
CUDA = DeviceFacts(torch.device("cuda"), "some GPU", 2**36)
NGRAM = "speculative_ngram"


def plan_for(facts: DeviceFacts, num_drafts: int = 3, **options: object) -> Plan:
    config = EngineConfig(model_path=str(FOLDER), max_running_requests=2, **options)  # type: ignore[arg-type]
    draft = DraftMemory(rows_per_request=1 + num_drafts)
    return make_plan(config, load_model_config(FOLDER), facts, num_weights=10**6, draft=draft)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_num_steps": 2}, "--speculative-num-steps needs a draft method"),
        ({"speculative_draft_model_path": "x"}, "--speculative-draft-model-path needs a draft"),
        ({"synthetic_acceptance": 2.0}, "--synthetic-acceptance needs a draft method"),
        (
            {f"{NGRAM}_min_match_window_size": 2},
            "-min-match-window-size needs --.*-algorithm ngram",
        ),
        (
            {"speculative_algorithm": "stub", f"{NGRAM}_max_match_window_size": 2},
            "^--speculative-ngram-max-match-window-size needs --speculative-algorithm ngram: add",
        ),
        (
            {"speculative_algorithm": "a:B", f"{NGRAM}_min_match_window_size": 1},
            "^--speculative-ngram-min-match-window-size needs --speculative-algorithm ngram: add",
        ),
        (
            {"speculative_algorithm": "ngram", f"{NGRAM}_min_match_window_size": 9},
            r"^--speculative-ngram-min-match-window-size must be in \[1, 8\] with",
        ),
        (
            {"speculative_algorithm": "ngram", f"{NGRAM}_max_match_window_size": 65},
            r"^--speculative-ngram-max-match-window-size must be in \[1, 64\], got 65",
        ),
        ({**{"speculative_algorithm": "ngram"}, "speculative_num_steps": 0}, r"in \[1, 7\], got 0"),
        ({**{"speculative_algorithm": "ngram"}, "speculative_num_steps": 8}, r"in \[1, 7\], got 8"),
        ({"speculative_algorithm": "ngram", "overlap": "on"}, "use --overlap auto"),
        (
            {"speculative_algorithm": "ngram", "synthetic_acceptance": 4.5},
            r"--synthetic-acceptance must be in \[1, 4\]",
        ),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2 is not supported: accepted is 1"),
        ({"attention_backend": "flash"}, "--attention-backend must be auto, one of torch, triton"),
        ({"attention_backend": "torch,triton,torch"}, "--attention-backend must be auto"),
        ({"attention_backend": "auto,torch"}, "--attention-backend must be auto"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    """V16, C-L7: one line that names the flag and what is accepted. Oracle: the table above."""
    with pytest.raises(ValueError, match=message):
        check_options(EngineConfig(model_path=str(FOLDER), **options))  # type: ignore[arg-type]


def test_settings_of_the_flags() -> None:
    """V1: k is 3 unless it is said, matches have 1 to 8 tokens. Oracle: the flags."""
    assert choose_speculation(EngineConfig()) is None
    config = EngineConfig(speculative_algorithm="ngram")
    assert choose_speculation(config) == SpecSettings("ngram", 3, min_match_len=1, max_match_len=8)
    config = EngineConfig(
        speculative_algorithm="ngram",
        speculative_ngram_min_match_window_size=2,
        speculative_ngram_max_match_window_size=5,
    )
    assert choose_speculation(config) == SpecSettings("ngram", 3, min_match_len=2, max_match_len=5)
    config = EngineConfig(
        speculative_algorithm="a:B",
        speculative_num_steps=7,
        speculative_draft_model_path="folder",
        synthetic_acceptance=2.5,
    )
    assert choose_speculation(config) == SpecSettings("a:B", 7, "folder", 2.5)


@pytest.mark.parametrize(
    ("wanted", "cuda_graphs", "backends"),
    [
        ("auto", "auto", ("triton", "triton")),
        ("triton,torch", "auto", ("triton", "triton")),
        ("triton,torch", "off", ("triton", "torch")),
        ("torch,triton", "auto", ("torch", "triton")),
        ("torch", "off", ("torch", "torch")),
    ],
)
def test_the_backend_that_captures_serves_both(
    wanted: str, cuda_graphs: str, backends: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """V16: of X,Y where only X captures several rows of a request becomes X, and it is logged.

    Oracle: the table above.
    """
    with caplog.at_level(logging.INFO):
        plan = plan_for(CUDA, attention_backend=wanted, cuda_graphs=cuda_graphs)
    assert (plan.prefill_backend, plan.decode_backend) == backends
    is_changed = backends != tuple(wanted.split(",") * 2)[:2] and wanted != "auto"
    assert ("becomes triton" in caplog.text) is is_changed


def test_two_backends_share_the_work_by_kind() -> None:
    """V16: prefills go to the first. Oracle: the objects."""
    split = build_backend("triton", "torch")
    assert isinstance(split, SplitAttention)
    assert (split.prefill, split.decode) == (TRITON_PAGED, TORCH_PAGED)
    assert split.capabilities is TORCH_PAGED.capabilities
    assert build_backend("torch", "torch") is TORCH_PAGED


def test_a_backend_that_cannot_capture_is_refused() -> None:
    """V16: names the flag and both ways out. Oracle: the message."""
    with pytest.raises(ValueError, match=r"-backend torch cannot run 4 rows.*triton, or"):
        plan_for(CUDA, attention_backend="torch")
    assert plan_for(CUDA, 0, attention_backend="torch").decode_backend == "torch"


@pytest.mark.parametrize(
    ("most", "remedy"), [(1, "leave --speculative-algorithm out"), (3, "-num-steps to 2")]
)
def test_each_layer_is_asked(most: int, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V16: a layer that declares fewer rows is refused by itself, whatever the backend says.

    Oracle: the message, and that the unchanged model passes.
    """
    model = meta_model(load_model_config(FOLDER), TORCH_PAGED)
    check_verify_layers(model, 7)
    monkeypatch.setattr(GdnMixer, "capabilities", RowCapabilities(most, can_capture=True))
    with pytest.raises(ValueError, match=f"layer 0 .GdnMixer. takes {most} rows.*{remedy}"):
        check_verify_layers(model, 3)


def test_drafts_have_room_beyond_the_longest_request() -> None:
    """V3, V15: rows of drafts lie past a request's length and need pages there.

    Oracle: the requests that fit into as many pages, by hand.
    """
    plan = plan_for(CPU, 7, max_model_len=128, max_kv_tokens=128, page_size=16)
    assert plan.limits.max_request_tokens == 128
    assert plan.memory.num_pages * 16 >= 128 + 7
    assert plan.max_row_tokens == 135
    assert plan.max_steps_in_flight == 1
    assert plan_for(CUDA, 0).max_steps_in_flight == 2
