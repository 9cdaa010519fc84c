"""The sampling state of every slot as device tensors, read by index inside a step.

Slot 0 is padding: greedy, neutral, never counted. Knows nothing of logits or of requests'
life cycles; writes are ordered by the current stream like any other tensor write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from engine.transfer import upload
from graphs.kernels.sample.rows import RowParams, SlotAdjustments

PADDING_SLOT = 0
MAX_EOS_TOKEN_IDS = 16

_NUM_FLOATS = 6
_NUM_INTS = 3
_MAX_MASKED_IDS = MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
_NO_TOKEN = -1
# Logits divided by less would overflow float32.
_MIN_REPETITION_PENALTY = 1e-6


class SamplingTable:
    """Per-slot sampling parameters and token counts, [1 + num_slots, ...] on one device.

    A slot holds what `set_row` last gave it, until the next request takes it. The tensors keep
    their addresses for the life of the table, so captured graphs may read them.

    floats: [S, 6] float32 and ints: [S, 3] int64, the columns of `RowParams`.
    bias_ids, bias_values: [S, MAX_LOGIT_BIAS], unused entries add 0.
    masked_ids: [S, ids] int64, tokens that may not come before min_tokens, else -1.
    output_counts: [S, V] int32 and in_prompt: [S, V] bool, right only in slots of requests
    with penalties.
    token_ids: [1, V] int64, every token in order.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate `num_slots` slots and the padding slot, all neutral."""
        num_rows = 1 + num_slots
        self.vocab_size = vocab_size
        self.floats = torch.empty(num_rows, _NUM_FLOATS, dtype=torch.float32, device=device)
        self.ints = torch.empty(num_rows, _NUM_INTS, dtype=torch.int64, device=device)
        # Unused entries point at different tokens: atomic adds to one address would queue up.
        self._unused_bias_ids = torch.arange(MAX_LOGIT_BIAS, device=device) % vocab_size
        self.bias_ids = self._unused_bias_ids.repeat(num_rows, 1)
        self.bias_values = torch.zeros(num_rows, MAX_LOGIT_BIAS, device=device)
        self.masked_ids = torch.full(
            (num_rows, _MAX_MASKED_IDS), _NO_TOKEN, dtype=torch.int64, device=device
        )
        self.output_counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
        self.token_ids = torch.arange(vocab_size, device=device)[None]
        neutral = SamplingParams(temperature=0.0)
        self.floats[:] = torch.tensor(_floats_from(neutral))
        self.ints[:] = torch.tensor(_ints_from(neutral, 0, vocab_size))

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, for those who keep their addresses."""
        return (
            self.floats,
            self.ints,
            self.bias_ids,
            self.bias_values,
            self.masked_ids,
            self.output_counts,
            self.in_prompt,
            self.token_ids,
        )

    def set_row(
        self,
        slot: int,
        params: SamplingParams,
        *,
        seed: int,
        eos_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Give `slot` to a request that starts, or resumes with `output_token_ids`.

        `seed` is the request's own or one drawn for it, -2^63 to 2^64 - 1. The tokens are read
        only where the request has penalties. Token ids must lie in the vocabulary.

        Raises:
            ValueError: the model has more than MAX_EOS_TOKEN_IDS end-of-sequence ids.
        """
        assert PADDING_SLOT < slot < len(self.floats), f"slot {slot}"
        device = self.floats.device
        self.floats[slot] = upload(_floats_from(params), device, torch.float32)
        self.ints[slot] = upload(_ints_from(params, seed, self.vocab_size), device)
        self._set_bias(slot, params)
        self._set_masked(slot, params, eos_ids)
        if params.has_penalties:
            prompt_ids = upload(prompt_token_ids, device)
            output_ids = upload(output_token_ids, device)
            ones = torch.ones_like(output_ids, dtype=torch.int32)
            self.in_prompt[slot].zero_().index_fill_(0, prompt_ids, True)
            self.output_counts[slot].zero_().index_add_(0, output_ids, ones)

    def count_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count generated tokens: [N] int64 each; a slot may occur often.

        Device work only. Entries for the padding slot are dropped, so a row that must not
        count can be sent there.
        """
        is_counted = (slots != PADDING_SLOT).int()
        places = slots * self.vocab_size + token_ids
        self.output_counts.view(-1).scatter_add_(0, places, is_counted)

    def gather(self, slots: Tensor) -> RowParams:
        """The parameters of the rows whose requests own `slots` [R]."""
        # Each number of all rows in one piece, for the kernels that read it.
        floats = self.floats.t().index_select(1, slots)
        temperature, top_p, min_p, presence, frequency, repetition = floats.unbind(0)
        top_k, seed, min_tokens = self.ints.t().index_select(1, slots).unbind(0)
        is_greedy = temperature == 0.0
        return RowParams(
            temperature=torch.where(is_greedy, 1.0, temperature),
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            top_k=top_k,
            seed=seed,
            min_tokens=min_tokens,
            is_greedy=is_greedy,
        )

    def adjustments(self) -> SlotAdjustments:
        """What rows look up by slot."""
        return SlotAdjustments(
            bias_ids=self.bias_ids,
            bias_values=self.bias_values,
            masked_ids=self.masked_ids,
            output_counts=self.output_counts,
            in_prompt=self.in_prompt,
        )

    def _set_bias(self, slot: int, params: SamplingParams) -> None:
        self.bias_ids[slot] = self._unused_bias_ids
        self.bias_values[slot] = 0.0
        num_biases = len(params.logit_bias)
        if num_biases:
            device = self.bias_ids.device
            values = list(params.logit_bias.values())
            self.bias_ids[slot, :num_biases] = upload(list(params.logit_bias), device)
            self.bias_values[slot, :num_biases] = upload(values, device, torch.float32)

    def _set_masked(self, slot: int, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        if len(eos_ids) > MAX_EOS_TOKEN_IDS:
            raise ValueError(f"eos_token_id: at most {MAX_EOS_TOKEN_IDS} ids are supported")
        masked = list(params.stop_token_ids)
        if not params.ignore_eos:
            masked.extend(eos_ids)
        unused = [_NO_TOKEN] * (_MAX_MASKED_IDS - len(masked))
        self.masked_ids[slot] = upload(masked + unused, self.masked_ids.device)


def sampling_bytes_per_slot(vocab_size: int) -> int:
    """Device bytes of one slot of a `SamplingTable`."""
    params_bytes = 4 * _NUM_FLOATS + 8 * _NUM_INTS
    ids_bytes = (8 + 4) * MAX_LOGIT_BIAS + 8 * _MAX_MASKED_IDS
    return params_bytes + ids_bytes + (4 + 1) * vocab_size


def _floats_from(params: SamplingParams) -> list[float]:
    """The `floats` columns. Temperature 0 marks greedy, where truncation changes nothing."""
    is_greedy = params.is_greedy
    return [
        0.0 if is_greedy else params.temperature,
        1.0 if is_greedy else params.top_p,
        0.0 if is_greedy else params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        max(params.repetition_penalty, _MIN_REPETITION_PENALTY),
    ]


def _ints_from(params: SamplingParams, seed: int, vocab_size: int) -> list[int]:
    """The `ints` columns: top_k, seed as a signed 64-bit number, min_tokens."""
    is_off = params.is_greedy or params.top_k <= 0 or params.top_k > vocab_size
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return [vocab_size if is_off else params.top_k, wrapped, params.min_tokens]
