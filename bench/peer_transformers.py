"""Greedy decoding of one stream by transformers on the CPU: the number that ours is beside.

    python -m bench.peer_transformers [--results FILE]

Run it from the repository's root on a quiet machine, with the test extra installed.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from server.bench.results import ResultRow, write_results

MODEL = Path(__file__).parents[1] / "server" / "embedded"
GEOMETRY = "gander-12m"


def read_flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="transformers, one greedy stream, CPU")
    parser.add_argument("--model-path", type=Path, default=MODEL)
    parser.add_argument("--geometry", default=GEOMETRY, help="the model's name in the results")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--num-threads", type=int, help="default: torch's choice")
    parser.add_argument("--results", type=Path, help="default: only print")
    return parser.parse_args()


@torch.inference_mode()
def decode_tok_s(
    model: transformers.PreTrainedModel, prompt: torch.Tensor, num_output: int
) -> float:
    """Tokens per second after the first one: two runs that differ in their length only."""
    took_s = []
    for num_tokens in (1, num_output):
        started_s = time.monotonic()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
        )
        took_s.append(time.monotonic() - started_s)
        assert output.shape[1] == prompt.shape[1] + num_tokens
    return (num_output - 1) / (took_s[1] - took_s[0])


def main() -> int:
    """Measure, print and write."""
    flags = read_flags()
    if flags.num_threads is not None:
        torch.set_num_threads(flags.num_threads)
    model = AutoModelForCausalLM.from_pretrained(
        flags.model_path, dtype=torch.float32, local_files_only=True
    ).eval()
    random = torch.Generator().manual_seed(0)
    rates = []
    # The first run warms up and is not counted.
    for _ in range(1 + flags.num_requests):
        prompt = torch.randint(model.config.vocab_size, (1, flags.prompt_tokens), generator=random)
        rates.append(decode_tok_s(model, prompt, flags.output_tokens))
    rate = statistics.median(rates[1:])
    peer = f"transformers {transformers.__version__}"
    print(f"{peer}: {rate:.1f} tokens/s for one greedy stream, {torch.get_num_threads()} threads")
    if flags.results is not None:
        row = ResultRow(
            bench="peer.stream",
            geometry=flags.geometry,
            dtype="float32",
            batch=1,
            context=flags.prompt_tokens,
            metric="decode_tok_s",
            value=round(rate, 3),
            unit="tok/s",
            peer=peer,
        )
        command = shlex.join(["python", "-m", "bench.peer_transformers", *sys.argv[1:]])
        write_results(flags.results, [row], command=command, device="cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
