"""What every test of drafting needs: a small target, settings, requests, a target to play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.model_config import ModelConfig, load_model_config
from engine.spec_protocol import DraftRequest, SpecSettings
from spec.proposer import Proposer

TARGET: ModelConfig = load_model_config(Path(__file__).parents[2] / "server" / "embedded")


def settings_for(algorithm: str, num_drafts: int = 3, path: Path | None = None) -> SpecSettings:
    return SpecSettings(algorithm, num_drafts, None if path is None else str(path))


def request_for(
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    max_drafts: int = 3,
    request_id: str = "a",
) -> DraftRequest:
    return DraftRequest(request_id, 1, prompt, output, max_drafts)


def play(
    proposer: Proposer, prompt: Sequence[int], target: Sequence[int], max_drafts: int
) -> tuple[list[int], list[int]]:
    """The output of a target that says `target`, and how many drafts each step accepted.

    The first token comes from prefill; then each step commits the drafts that agree with the
    target, and one token of the target's own.
    """
    output = [target[0]]
    accepted = []
    while len(output) < len(target):
        room = min(max_drafts, len(target) - len(output) - 1)
        (drafts,) = proposer.propose([request_for(prompt, output, max_drafts=room)])
        num_accepted = 0
        for draft, token in zip(drafts[:room], target[len(output) :], strict=False):
            if draft != token:
                break
            num_accepted += 1
        output += [*drafts[:num_accepted], target[len(output) + num_accepted]]
        accepted.append(num_accepted)
    return output, accepted
