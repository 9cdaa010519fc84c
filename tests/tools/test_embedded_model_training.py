"""The network of the embedded model and its training."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.embedded_model.training.checkpoint import load_net, load_weights, save_checkpoint
from tools.embedded_model.training.config import ModelConfig, TrainConfig
from tools.embedded_model.training.gdn import choose_delta_rule, chunked_delta_rule
from tools.embedded_model.training.model import Net
from tools.embedded_model.training.optimizer import Optimizer, learning_rate_scale, orthogonalize
from tools.embedded_model.training.sample import continue_greedily, draft_agreement
from tools.embedded_model.training.train import train_step

CHECKPOINT = Path(__file__).parents[2] / "server" / "embedded"
TINY = ModelConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
)


def test_chunked_delta_rule_is_the_recurrence() -> None:
    """S1. Oracle: the recurrence, token by token in float64."""
    torch.manual_seed(0)
    B, T, H, K, G, V = 2, 75, 2, 8, 6, 5
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, G, V)
    log_decay, beta = -torch.rand(B, T, G), torch.rand(B, T, G)
    queries, keys = (
        torch.nn.functional.normalize(x.double(), dim=-1).repeat_interleave(G // H, 2)
        for x in (q, k)
    )
    state = torch.zeros(B, G, K, V, dtype=torch.float64)
    outputs = []
    for t in range(T):
        state = state * log_decay[:, t].double().exp()[..., None, None]
        seen = torch.einsum("bgk,bgkv->bgv", keys[:, t], state)
        update = (v[:, t] - seen) * beta[:, t, :, None]
        state = state + keys[:, t, :, :, None] * update[:, :, None]
        outputs.append(torch.einsum("bgk,bgkv->bgv", queries[:, t] * K**-0.5, state))
    result = chunked_delta_rule(q, k, v, log_decay, beta)
    torch.testing.assert_close(result.double(), torch.stack(outputs, 1), atol=2e-5, rtol=1e-4)


def test_unknown_kernels_are_refused() -> None:
    """S1. Oracle: the accepted names stand in the message."""
    with pytest.raises(ValueError, match="accepted: torch, fla"):
        choose_delta_rule("auto", TINY, "cpu")
    with pytest.raises(ValueError, match="needs device cuda"):
        choose_delta_rule("fla", TINY, "cpu")


def test_saved_checkpoints_load_elsewhere_with_equal_logits(tmp_path: Path) -> None:
    """S1. Oracle: transformers on the saved files, float32; the main head only."""
    torch.manual_seed(1)
    net = Net(TINY)
    save_checkpoint(net, tmp_path, {})
    load_weights(net, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab_size, (2, 70))
    with torch.no_grad():
        logits = net.eval().logits(net.hidden(ids)[0])
        expected = peer.eval()(ids).logits
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    again = load_net(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in net.state_dict().items())


def test_the_published_checkpoint_adds_numbers() -> None:
    """S1. Oracle: Python's 17 + 25, in the greedy continuation of the main head."""
    net = load_net(CHECKPOINT)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    prompt = (
        "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    start = tokenizer.encode(prompt, add_special_tokens=False).ids
    tokens = continue_greedily(net, start, 30, tokenizer.token_to_id("<|im_end|>"))
    assert str(17 + 25) in tokenizer.decode(tokens[len(start) :])
    # The draft head is trained too: most of its first drafts are the next token but one.
    assert draft_agreement(net, tokens, len(start))[0] > 0.5


def test_orthogonalized_matrices_keep_their_directions() -> None:
    """S1. Oracle: the singular value decomposition; the iteration aims at 1, within 0.5."""
    torch.manual_seed(2)
    for shape in ((3, 12, 20), (2, 20, 12)):
        matrices = torch.randn(shape)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        aligned = left.mT @ orthogonalize(matrices) @ right.mT
        values = torch.diagonal(aligned, dim1=-2, dim2=-1)
        assert ((values > 0.5) & (values < 1.5)).all()
        torch.testing.assert_close(aligned, torch.diag_embed(values), atol=1e-4, rtol=0)


def test_learning_rate_warms_up_stays_and_decays() -> None:
    """S1. Oracle: the schedule, computed by hand."""
    assert learning_rate_scale(0, 0.0) == pytest.approx(0.01)
    assert learning_rate_scale(200, 0.5) == 1.0
    assert learning_rate_scale(900, 0.8) == pytest.approx(0.5)
    assert learning_rate_scale(900, 1.0) == pytest.approx(0.02)


def test_training_steps_lower_every_loss() -> None:
    """S1. Oracle: the losses before; main head and drafts learn one repeated batch."""
    torch.manual_seed(3)
    config = TrainConfig(
        row_len=24,
        num_rows=4,
        adam_lr=0.01,
        num_workers=0,
        synthetic_share=1.0,
        deep_draft_divisor=2,
    )
    net = Net(TINY, deep_draft_divisor=config.deep_draft_divisor)
    optimizer = Optimizer.of(net, config, "cpu")
    ids = torch.randint(0, TINY.vocab_size, (4, 24 + 1 + config.num_draft_steps))
    first = [loss.item() for loss in train_step(net, ids, config.num_draft_steps)]
    for step in range(40):
        optimizer.step(step, 1.0)
        net.zero_grad()
        losses = [loss.item() for loss in train_step(net, ids, config.num_draft_steps)]
    assert len(first) == 1 + config.num_draft_steps
    assert all(after < before - 1 for before, after in zip(first, losses, strict=True))
