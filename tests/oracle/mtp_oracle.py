"""Drafts of a checkpoint's multi-token-prediction layer in plain torch, fp32 on the CPU.

Written from the formulas of the layer; knows no pages, slots, caches or batches. transformers,
which leaves `mtp.*` aside, gives the hidden rows after the target's final norm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3NextForCausalLM,
)

from tests.oracle.mtp_layer import MtpLayer, MtpShape

TARGETS: dict[str, type[PreTrainedModel]] = {
    target.__name__: target
    for target in (
        Qwen3_5ForCausalLM,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3NextForCausalLM,
    )
}


@dataclass(frozen=True)
class Draft:
    """A draft, and how far its logit is above the second best."""

    token_id: int
    margin: float


class MtpOracle:
    """The target and the MTP layer of one checkpoint.

    `draft_folder` holds `mtp.*` for a target whose own folder has none.
    """

    def __init__(self, folder: Path, draft_folder: Path | None = None) -> None:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        target = TARGETS[architecture].from_pretrained(folder, dtype=torch.float32)
        self.target: PreTrainedModel = target.eval()
        config = self.target.config.get_text_config().to_dict()
        tensors = read_mtp_tensors(draft_folder or folder)
        self.layer = MtpLayer(tensors, MtpShape.from_config(config))
        self.embedding: Tensor = self.target.get_input_embeddings().weight.detach()
        self.head: Tensor = self.target.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def hidden_rows(self, token_ids: Sequence[int]) -> Tensor:
        """The target's rows after its final norm [len(token_ids), hidden]."""
        outputs = self.target(
            torch.tensor([list(token_ids)]), output_hidden_states=True, logits_to_keep=1
        )
        return outputs.hidden_states[-1][0]

    def draft(self, token_ids: Sequence[int], num_drafts: int) -> list[int]:
        """The drafts that follow `token_ids`, whose last is the pending token."""
        return [draft.token_id for draft in self.drafts(token_ids, num_drafts)]

    @torch.no_grad()
    def drafts(self, token_ids: Sequence[int], num_drafts: int) -> list[Draft]:
        """The same with margins: the whole layer over all pairs again for each draft.

        At least two tokens: the pending one and one that the target has read.
        """
        assert len(token_ids) >= 2
        next_ids = list(token_ids[1:])
        hidden = self.hidden_rows(token_ids[:-1])
        drafts: list[Draft] = []
        for _ in range(num_drafts):
            output = self.layer.forward(self.embedding[next_ids], hidden)
            drafts += self._choose(output[-1:])
            next_ids.append(drafts[-1].token_id)
            hidden = torch.cat([hidden, output[-1:]])
        return drafts

    @torch.no_grad()
    def drafts_along(
        self, token_ids: Sequence[int], num_drafts: int, first_len: int = 2
    ) -> dict[int, list[Draft]]:
        """`drafts(token_ids[:n], num_drafts)` for every n from `first_len` to the end.

        One run of the target and `num_drafts` of the layer serve them all.
        """
        assert first_len >= 2
        last_pairs = torch.arange(first_len - 2, len(token_ids) - 1)
        hidden = self.hidden_rows(token_ids[:-1])
        output, pairs = self.layer.read(self.embedding[list(token_ids[1:])], hidden)
        output = output[last_pairs]
        columns = [self._choose(output)]
        chain = self.layer.start_chains(pairs, last_pairs)
        while len(columns) < num_drafts:
            next_ids = [draft.token_id for draft in columns[-1]]
            output = self.layer.extend_chains(chain, self.embedding[next_ids], output)
            columns.append(self._choose(output))
        lengths = range(first_len, len(token_ids) + 1)
        return {n: list(row) for n, row in zip(lengths, zip(*columns, strict=True), strict=True)}

    @torch.no_grad()
    def continue_greedily(
        self, prompt: Sequence[int], max_tokens: int, end_ids: Sequence[int] = ()
    ) -> list[int]:
        """The target's greedy tokens after `prompt`, up to and with the first of `end_ids`."""
        ids = torch.tensor([list(prompt)])
        generated = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
        )
        return generated[0, len(prompt) :].tolist()

    def _choose(self, output: Tensor) -> list[Draft]:
        best = (output @ self.head.T).topk(2)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        token_ids = best.indices[:, 0].tolist()
        return [Draft(token, margin) for token, margin in zip(token_ids, margins, strict=True)]


def read_mtp_tensors(folder: Path) -> dict[str, Tensor]:
    """All `mtp.*` of a folder in fp32, their names without that prefix."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.startswith("mtp."):
                tensors[name.removeprefix("mtp.")] = tensor.float()
    assert tensors, f"no mtp.* in {folder}"
    return tensors


def num_right(drafts: Sequence[Draft], following: Sequence[int]) -> int:
    """How many drafts agree with the tokens that the target chose, before the first that errs."""
    for index, (draft, token_id) in enumerate(zip(drafts, following, strict=False)):
        if draft.token_id != token_id:
            return index
    return min(len(drafts), len(following))
