"""Greedy samples of a checkpoint, and how often its own drafts agree with it.

    python -m tools.embedded_model.training.sample CHECKPOINT

CHECKPOINT holds tokenizer.json beside the weights. Without a cache: slow, for a look only.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.embedded_model.prompts import fresh_prompts
from tools.embedded_model.render import render
from tools.embedded_model.tokenizer import END_OF_TURN
from tools.embedded_model.training.checkpoint import load_net
from tools.embedded_model.training.model import Net

_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is 12 + 7?",
    "Tell me a story about a fox named Leo.",
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Sort these words alphabetically: tree, apple, moon",
    "Give me three fruits.",
    "How do I make a cup of tea?",
)
_NUM_DRAFT_STEPS = 4
_PROMPT_SEED = 99


@torch.no_grad()
def continue_greedily(net: Net, tokens: list[int], max_new: int, stop: int) -> list[int]:
    """Return the tokens with up to `max_new` more, the stop token included."""
    tokens = list(tokens)
    for _ in range(max_new):
        hidden, _ = net.hidden(torch.tensor([tokens]))
        tokens.append(int(net.logits(hidden[:, -1]).argmax(-1)))
        if tokens[-1] == stop:
            break
    return tokens


@torch.no_grad()
def draft_agreement(net: Net, tokens: list[int], prompt_len: int) -> list[float]:
    """For draft depth 1, 2, ...: the share of positions whose drafts up to there are all right.

    Every position after the prompt drafts a chain that is compared with the tokens that follow.
    The attention of a draft step sees the right tokens before it, so this is an estimate.
    """
    ids = torch.tensor(tokens)
    hidden, (cos, sin) = net.hidden(ids[None, :-1])
    is_right = torch.ones(len(tokens) - 1, dtype=torch.bool)
    shares = []
    for depth in range(1, _NUM_DRAFT_STEPS + 1):
        # Position i drafts token i + 1 + depth from the embedding of token i + depth.
        num_positions = len(tokens) - 1 - depth
        if num_positions < prompt_len:
            break
        embedding = net.model.embed_tokens(ids[None, depth : depth + num_positions])
        rotary = cos[:num_positions], sin[:num_positions]
        hidden = net.mtp(hidden[:, :num_positions], embedding, rotary)
        drafts = net.logits(hidden[0]).argmax(-1)
        targets = ids[depth + 1 : depth + 1 + num_positions]
        is_right = is_right[:num_positions] & (drafts == targets)
        shares.append(is_right[prompt_len - 1 :].float().mean().item())
    return shares


def main() -> None:
    """Print samples and the mean agreement on fresh prompts."""
    parser = argparse.ArgumentParser(description="Sample from a checkpoint.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--num-prompts", type=int, default=20)
    options = parser.parse_args()
    net = load_net(options.checkpoint)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    stop = tokenizer.token_to_id(END_OF_TURN)

    def sampled(prompt: str, max_new: int) -> tuple[str, list[float]]:
        start = tokenizer.encode(prompt, add_special_tokens=False).ids
        tokens = continue_greedily(net, start, max_new, stop)
        text = tokenizer.decode(tokens[len(start) :], skip_special_tokens=False)
        return text, draft_agreement(net, tokens, len(start))

    for question in _QUESTIONS:
        text, shares = sampled(_prompt(question), 80)
        print(">>", question, "\n", text, [round(share, 2) for share in shares])
    totals: list[list[float]] = [[] for _ in range(_NUM_DRAFT_STEPS)]
    for prompt in fresh_prompts(_PROMPT_SEED, options.num_prompts):
        for total, share in zip(totals, sampled(prompt, 60)[1], strict=False):
            total.append(share)
    means = [round(sum(total) / len(total), 3) for total in totals if total]
    print("agreement by depth", means)


def _prompt(question: str) -> str:
    """A chat up to the answer, without reasoning."""
    chat = render([{"role": "user", "content": question}, {"role": "assistant", "content": ""}])
    return chat.removesuffix("<|im_end|>\n")


if __name__ == "__main__":
    main()
