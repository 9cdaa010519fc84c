"""Prompt lookup decoding (A. Saxena, 2023), over the prompt and the output of a request."""

from __future__ import annotations

from collections.abc import Sequence

from engine.model_config import ModelConfig
from engine.spec_protocol import DraftRequest, SpecSettings
from spec.ngram.suffix_index import SuffixIndex
from spec.proposer import Proposer


class NgramProposer(Proposer):
    """Drafts what followed the last tokens where they occurred before, in the same request.

    The longest match of `match_lengths` wins, of equally long ones the last. A copy that reaches
    the end of the history goes on with its own first drafts, as a text that repeats itself would.

    Host memory: at most one dict entry for each length and token of the running requests,
    together 100 to 400 bytes a token with matches of 1 to 8 tokens.
    """

    def __init__(self, settings: SpecSettings, model: ModelConfig) -> None:
        """Nothing is kept before the first request.

        Raises:
            ValueError: a draft model was named.
        """
        super().__init__(settings, model)
        if settings.draft_model_path is not None:
            raise ValueError(
                f"--speculative-draft-model-path {settings.draft_model_path}: ngram copies from "
                f"the request's own tokens and takes no draft model; leave the flag out"
            )
        self._match_lengths = match_lengths(settings.min_match_len, settings.max_match_len)
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """See the class. Reads the tokens that were committed since the last call, no others."""
        return [self._drafts(request) for request in requests]

    def release(self, request_id: str) -> None:
        """Drop the request's index."""
        self._indexes.pop(request_id, None)

    def _drafts(self, request: DraftRequest) -> list[int]:
        prompt, output = request.prompt_token_ids, request.output_token_ids
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = SuffixIndex(self._match_lengths)
        index.extend(prompt[len(index) :])
        index.extend(output[len(index) - len(prompt) :])
        start = index.find_next()
        if start is None:
            return []
        drafts: list[int] = []
        for place in range(start, start + request.max_drafts):
            if place < len(prompt):
                drafts.append(prompt[place])
            elif place < len(index):
                drafts.append(output[place - len(prompt)])
            else:
                drafts.append(drafts[place - len(index)])
        return drafts


def match_lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """Lengths of the matches to look for, longest first: halved until they are the shortest.

    Halving finds nearly all that every length does. Rows without a draft cost as much as rows
    with one, so by default even a match of one token is worth a draft.
    """
    lengths = []
    while longest > shortest:
        lengths.append(longest)
        longest //= 2
    return (*lengths, shortest)
