"""Train the embedded model and write a checkpoint.

    python -m tools.embedded_model.training.train --data DATA --out OUT --seconds 540

DATA is what `build` wrote. A run lasts a number of seconds, set-up included, or of steps.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.embedded_model.training.checkpoint import load_weights, save_checkpoint
from tools.embedded_model.training.config import PRESETS, TrainConfig
from tools.embedded_model.training.gdn import choose_delta_rule
from tools.embedded_model.training.model import Net
from tools.embedded_model.training.optimizer import Optimizer, learning_rate_scale
from tools.embedded_model.training.progress import Clock, Report
from tools.embedded_model.training.rows import Batches, SyntheticSource, natural_rows

_DRAFT_LOSS_WEIGHTS = (0.3, 0.2, 0.15, 0.1)
# Compiling and autotuning are over after these steps.
_SETUP_STEPS = 3
_REPORT_STEPS = 50
_SAVE_INTERVAL_S = 120
_MAX_VALIDATION_ROWS = {"cuda": 32, "cpu": 6}


# (ids, num_draft_steps) -> losses: a network, compiled or not.
LossFunction = Callable[[Tensor, int], list[Tensor]]


@dataclass(frozen=True)
class Options:
    """The command line."""

    data: Path
    out: Path
    preset: str
    seconds: float
    num_steps: int
    seed: int
    lr_scale: float
    resume: Path | None
    gdn_kernel: str
    is_eager: bool


def train(net: Net, batches: Batches, config: TrainConfig, clock: Clock, options: Options) -> None:
    """Run until the clock is over; save now and then, validate and save at the end."""
    device = batches.device
    optimizer = Optimizer.of(net, config, device)
    is_compiled = device == "cuda" and not options.is_eager
    compiled = torch.compile(net) if is_compiled else net
    report = Report(clock)
    step = num_tokens = 0
    saved = time.monotonic()
    while True:
        if step == _SETUP_STEPS:
            clock.finish_setup()
            report.start_interval(num_tokens)
        progress = clock.progress(step)
        if time.monotonic() - saved > _SAVE_INTERVAL_S:
            save_checkpoint(net, options.out, report.record(step, num_tokens))
            saved = time.monotonic()
        if progress >= 1:
            break
        lr_scale = learning_rate_scale(step, progress) * options.lr_scale
        losses = train_step(compiled, batches.next(), config.num_draft_steps)
        optimizer.step(step, lr_scale)
        net.zero_grad(set_to_none=True)
        step += 1
        num_tokens += config.num_rows * config.row_len
        if step % _REPORT_STEPS == 0 or step == 1:
            report.add(step, num_tokens, lr_scale, losses)
    validation = validate(net, options.data / "val.npz", config, device)
    rounded = {name: [round(loss, 3) for loss in losses] for name, losses in validation.items()}
    print(f"val {json.dumps(rounded)}", flush=True)
    record = report.record(step, num_tokens)
    record |= {"seconds": clock.elapsed_s(), "val": validation}
    save_checkpoint(net, options.out, record)


def train_step(net: LossFunction, ids: Tensor, num_draft_steps: int) -> list[Tensor]:
    """Add the gradients of one batch; returns the losses of the main head and the draft steps."""
    with _autocast(ids.device.type):
        losses = net(ids, num_draft_steps)
        drafts = zip(_DRAFT_LOSS_WEIGHTS, losses[1:], strict=True)
        total = losses[0] + sum(weight * loss for weight, loss in drafts)
    total.backward()
    return losses


@torch.no_grad()
def validate(net: Net, path: Path, config: TrainConfig, device: str) -> dict[str, list[float]]:
    """Losses of the main head and the draft steps on the held-out text of every source."""
    row_len = config.row_len + 1 + config.num_draft_steps
    net.eval()
    results = {}
    for name, tokens in np.load(path).items():
        num_rows = min(len(tokens) // row_len, _MAX_VALIDATION_ROWS[device])
        if num_rows == 0:
            continue
        rows = tokens[: num_rows * row_len].astype(np.int64).reshape(num_rows, row_len)
        with _autocast(device):
            losses = net(torch.from_numpy(rows).to(device), config.num_draft_steps)
        results[name] = [loss.item() for loss in losses]
    net.train()
    return results


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def main() -> None:
    """Train from the command line."""
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    model_config, config = PRESETS[options.preset]
    row_len = config.row_len + 1 + config.num_draft_steps
    started = time.monotonic()
    source = SyntheticSource(options.seed, options.data, row_len, config.num_workers)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.backends.cuda.matmul.allow_tf32 = True
        rule = choose_delta_rule(options.gdn_kernel, model_config, device)
        torch.manual_seed(options.seed)
        net = Net(model_config, rule, config.deep_draft_divisor).to(device)
        if options.resume:
            load_weights(net, options.resume)
        num_parameters = sum(parameter.numel() for parameter in net.parameters())
        print(f"{num_parameters / 1e6:.2f}M parameters on {device}", flush=True)
        natural = natural_rows(options.data, row_len, np.random.default_rng(options.seed))
        batches = Batches(source, natural, config, device)
        train(net, batches, config, Clock(options.seconds, options.num_steps, started), options)
    finally:
        source.close()


def parse_options() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--data", type=Path, required=True, help="folder that build wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--preset", choices=PRESETS, default="gpu")
    parser.add_argument("--seconds", type=float, default=540, help="length of the run")
    parser.add_argument("--num-steps", type=int, default=0, help="steps instead of seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--resume", type=Path, help="checkpoint folder to start from")
    parser.add_argument("--gdn-kernel", choices=["torch", "fla"], default="torch")
    parser.add_argument("--eager", dest="is_eager", action="store_true", help="do not compile")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
