"""Rows of tokens: synthetic ones made on the fly, natural ones from the encoded sources."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tools.embedded_model.facts import read_facts
from tools.embedded_model.synthetic.documents import synthetic_documents
from tools.embedded_model.tokenizer import END_OF_TEXT
from tools.embedded_model.training.config import TrainConfig

Rows = NDArray[np.uint16]
_ENCODE_BATCH = 512
_ROWS_PER_BLOCK = 64
_ROWS_PER_WORKER_BLOCK = 256
_QUEUE_BLOCKS = 64
_DOCUMENT_START_SHARE = 0.7


def synthetic_blocks(seed: int, data: Path, row_len: int, num_rows: int) -> Iterator[Rows]:
    """Yield [num_rows, row_len] without end; every row begins with a document."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    documents = synthetic_documents(seed, read_facts(data / "facts.json"))
    encoded: list[list[int]] = []
    while True:
        rows: list[list[int]] = []
        while len(rows) < num_rows:
            row: list[int] = []
            while len(row) < row_len:
                if not encoded:
                    batch = [next(documents) for _ in range(_ENCODE_BATCH)]
                    encodings = tokenizer.encode_batch(batch, add_special_tokens=False)
                    encoded = [encoding.ids for encoding in encodings]
                row += [*encoded.pop(), end]
            rows.append(row[:row_len])
        yield np.array(rows, dtype=np.uint16)


def natural_rows(data: Path, row_len: int, rng: np.random.Generator) -> Iterator[Rows]:
    """Yield [row_len] without end, from random places; most rows begin with a document."""
    tokens = np.load(data / "natural_train.npy")
    # The last document has its end mark too.
    starts = np.concatenate([[0], np.flatnonzero(tokens == tokens[-1])[:-1] + 1])
    while True:
        if rng.random() < _DOCUMENT_START_SHARE:
            start = rng.choice(starts)
        else:
            start = rng.integers(0, len(tokens) - row_len)
        if start + row_len <= len(tokens):
            yield tokens[start : start + row_len]


class SyntheticSource:
    """Synthetic rows from worker processes, or from this process if there are none.

    Workers are forked: start them before CUDA is initialized, and close them at the end.
    """

    def __init__(self, seed: int, data: Path, row_len: int, num_workers: int) -> None:
        self.rows = np.zeros((0, row_len), np.uint16)
        self.workers: list[multiprocessing.process.BaseProcess] = []
        first_seed = seed * 1000
        if num_workers == 0:
            self.blocks = synthetic_blocks(first_seed, data, row_len, _ROWS_PER_BLOCK)
            return
        context = multiprocessing.get_context("fork")
        queue: Any = context.Queue(_QUEUE_BLOCKS)
        self.blocks = _received(queue)
        for worker_seed in range(first_seed, first_seed + num_workers):
            arguments = (queue, worker_seed, data, row_len)
            process = context.Process(target=_fill_queue, args=arguments, daemon=True)
            process.start()
            self.workers.append(process)

    def take(self, num_rows: int) -> Rows:
        """Return the next rows, [num_rows, row_len]."""
        while len(self.rows) < num_rows:
            self.rows = np.concatenate([self.rows, next(self.blocks)])
        taken, self.rows = self.rows[:num_rows], self.rows[num_rows:]
        return taken

    def close(self) -> None:
        """Stop the workers."""
        for process in self.workers:
            process.terminate()
            process.join()


class Batches:
    """Training batches: synthetic rows first, then natural ones."""

    def __init__(
        self,
        synthetic: SyntheticSource,
        natural: Iterator[Rows],
        config: TrainConfig,
        device: str,
    ) -> None:
        self.synthetic, self.natural = synthetic, natural
        self.num_synthetic = round(config.num_rows * config.synthetic_share)
        self.num_natural = config.num_rows - self.num_synthetic
        self.device = device

    def next(self) -> Tensor:
        """Token ids, [num_rows, row_len]."""
        rows = self.synthetic.take(self.num_synthetic)
        if self.num_natural:
            natural = np.stack([next(self.natural) for _ in range(self.num_natural)])
            rows = np.concatenate([rows, natural])
        return torch.from_numpy(rows.astype(np.int64)).to(self.device, non_blocking=True)


def _received(queue: Any) -> Iterator[Rows]:  # noqa: ANN401
    while True:
        yield queue.get()


def _fill_queue(queue: Any, seed: int, data: Path, row_len: int) -> None:  # noqa: ANN401
    for block in synthetic_blocks(seed, data, row_len, _ROWS_PER_WORKER_BLOCK):
        queue.put(block)
