"""The draft method of tests and demos: drafts whose accept counts are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.model_config import ModelConfig
from engine.spec_protocol import DraftRequest, SpecSettings
from spec.proposer import Proposer
from spec.stub.script import Script, read_script


class StubProposer(Proposer):
    """Drafts the known output of a prompt, one draft of each step made wrong.

    `--speculative-draft-model-path` names a file of JSON lines, each with `prompt_token_ids` and
    `output_token_ids`. A request with that prompt gets the tokens that the file has after the
    committed ones. In its step s (from 0) the draft at s mod (k + 1) is wrong, where k stands for
    none: k + 1 steps have accepted every number of drafts from 0 to k. After the file's last
    token there are no drafts. A request with another prompt, and every request without a file,
    gets its pending token k times.
    """

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        """Read the file.

        Raises:
            ValueError: the file is not usable; see `read_script`.
        """
        super().__init__(settings, model)
        path = settings.draft_model_path
        self._script: Script = {} if path is None else read_script(Path(path), model.vocab_size)
        self._requests: dict[str, _Replay] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See the class."""
        return [self._drafts(request) for request in requests]

    def release(self, request_id: str) -> None:
        """Start again at step 0, should the request come back."""
        self._requests.pop(request_id, None)

    def _drafts(self, request: DraftRequest) -> list[int]:
        replay = self._requests.get(request.request_id)
        if replay is None:
            replay = _Replay(self._script.get(tuple(request.prompt_token_ids)))
            self._requests[request.request_id] = replay
        if replay.output is None:
            tokens = request.output_token_ids or request.prompt_token_ids
            return [tokens[-1]] * request.max_drafts
        start = len(request.output_token_ids)
        drafts = list(replay.output[start : start + request.max_drafts])
        wrong = replay.num_steps % (self.settings.num_drafts + 1)
        replay.num_steps += 1
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % self.model.vocab_size
        return drafts


class _Replay:
    """A request's known output, or None, and how many steps have drafted from it."""

    def __init__(self, output: Sequence[int] | None) -> None:
        self.output = output
        self.num_steps = 0
