"""The trained network: layers, tied head and one layer that drafts further tokens.

Shapes: B rows, T tokens, H hidden size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.embedded_model.training.config import ModelConfig
from tools.embedded_model.training.gdn import DeltaRule, chunked_delta_rule
from tools.embedded_model.training.layers import Layer, RMSNorm, Rotary

_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, rule: DeltaRule) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, rule, config.is_full_attention(i))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DraftHead(nn.Module):
    """One attention layer over the last hidden state and the embedding of the next token."""

    def __init__(self, config: ModelConfig, rule: DeltaRule) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(config, rule, is_full_attention=True)])
        self.norm = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)

    def forward(self, hidden: Tensor, next_embedding: Tensor, rotary: Rotary) -> Tensor:
        """[B,T,H] after a final norm, [B,T,H] -> [B,T,H], again after a final norm."""
        pair = [self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.layers[0](self.fc(torch.cat(pair, -1)), rotary))


class Net(nn.Module):
    """The model with its draft head; the head that scores tokens is the embedding."""

    def __init__(
        self,
        config: ModelConfig,
        rule: DeltaRule = chunked_delta_rule,
        deep_draft_divisor: int = 1,
    ) -> None:
        """Draw the weights from torch's generator.

        In training, draft steps after the first see one row in `deep_draft_divisor`.
        """
        super().__init__()
        self.config = config
        self.deep_draft_divisor = deep_draft_divisor
        self.model = Decoder(config, rule)
        self.mtp = DraftHead(config, rule)
        self._init_matrices()
        exponents = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
        self.frequencies = 1.0 / (config.rope_theta**exponents)

    def _init_matrices(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            std = 0.02 if "embed" in name else 0.5 / math.sqrt(parameter.shape[1])
            if name.endswith(_RESIDUAL_OUTPUTS):
                std *= 1 / math.sqrt(2 * self.config.num_hidden_layers)
            nn.init.normal_(parameter, std=std)

    def rotary(self, num_tokens: int, device: torch.device) -> Rotary:
        """(cos, sin) of the first positions, each [T, rotary_dim]."""
        positions = torch.arange(num_tokens, device=device).float()
        angles = positions[:, None] * self.frequencies.to(device)[None]
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def hidden(self, ids: Tensor) -> tuple[Tensor, Rotary]:
        """[B,T] -> [B,T,H] after the final norm, and the rotary table that was used."""
        rotary = self.rotary(ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rotary)
        return self.model.norm(x), rotary

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocabulary]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor, num_draft_steps: int = 1) -> list[Tensor]:
        """[B, T + 1 + num_draft_steps] -> mean losses of the main head and of every draft step.

        A draft step feeds on the output of the step before, as it will when it drafts.
        """
        T = ids.shape[1] - 1 - num_draft_steps
        hidden, rotary = self.hidden(ids[:, :T])
        losses = [self._loss(hidden, ids[:, 1 : T + 1])]
        for step in range(1, num_draft_steps + 1):
            if step == 2 and self.training:
                num_rows = max(1, len(ids) // self.deep_draft_divisor)
                hidden, ids = hidden[:num_rows], ids[:num_rows]
            embedding = self.model.embed_tokens(ids[:, step : T + step])
            hidden = self.mtp(hidden, embedding, rotary)
            losses.append(self._loss(hidden, ids[:, step + 1 : T + step + 1]))
        return losses

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden).float().flatten(0, 1), targets.flatten())
