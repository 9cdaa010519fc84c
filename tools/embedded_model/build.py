"""Build the training data: read the sources, train the tokenizer, encode.

    python -m tools.embedded_model.build SOURCES OUT

SOURCES is the folder that fetch_sources.sh filled. OUT gets facts.json, tokenizer.json,
natural_train.npy and val.npz.
"""

import argparse
import json
import random
import time
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.embedded_model.facts import facts_from_json
from tools.embedded_model.render import render
from tools.embedded_model.sources.catalog import SOURCES
from tools.embedded_model.sources.countries import country_facts
from tools.embedded_model.sources.dictionary import common_meanings
from tools.embedded_model.synthetic.documents import synthetic_documents
from tools.embedded_model.tokenizer import encode_documents, train_tokenizer

SYNTHETIC = "synth"
_NUM_PROCESSES = 2
_SYNTHETIC_SEEDS = range(1000, 1008)
_TOKENIZER_SEED = 5
_MAX_TOKENIZER_DOCUMENTS = 4000
_MAX_TOKENIZER_SYNTHETIC = 60_000
Documents = dict[str, list[str]]


def main() -> None:
    """Build everything that training reads."""
    parser = argparse.ArgumentParser(description="Build the training data.")
    parser.add_argument("sources", type=Path, help="folder filled by fetch_sources.sh")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--synthetic-mb", type=int, default=60, help="synthetic text to sample")
    parser.add_argument("--vocab-size", type=int, default=8192)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    facts = {
        "countries": country_facts(options.sources),
        "words": common_meanings(options.sources),
    }
    (options.out / "facts.json").write_text(json.dumps(facts))
    documents = read_documents(options.sources, facts, options.synthetic_mb)
    print(f"documents ready in {time.monotonic() - start:.0f} s")
    train, validation = split_documents(documents)
    tokenizer = train_tokenizer(sample_for_tokenizer(train), options.vocab_size)
    tokenizer.save(str(options.out / "tokenizer.json"))
    rows = [_encode_and_report(tokenizer, name, train[name]) for name in SOURCES]
    np.save(options.out / "natural_train.npy", np.concatenate(rows))
    held_out = {name: encode_documents(tokenizer, texts) for name, texts in validation.items()}
    np.savez_compressed(options.out / "val.npz", **held_out)  # type: ignore[arg-type]


def read_documents(sources: Path, facts: dict[str, Any], synthetic_mb: int) -> Documents:
    """The documents of every source, shuffled, and a sample of the synthetic ones."""
    num_chars = synthetic_mb * 10**6 // len(_SYNTHETIC_SEEDS)
    samples = [(seed, num_chars, facts) for seed in _SYNTHETIC_SEEDS]
    with Pool(_NUM_PROCESSES) as pool:
        natural = pool.starmap(_source_documents, [(name, sources) for name in SOURCES], 1)
        synthetic = pool.starmap(_synthetic_sample, samples, 1)
    documents = dict(zip(SOURCES, natural, strict=True))
    documents[SYNTHETIC] = [text for sample in synthetic for text in sample]
    return documents


def split_documents(documents: Documents) -> tuple[Documents, Documents]:
    """Split off the first documents of every source for validation: 1 in 200, 2 to 400."""
    train, validation = {}, {}
    for name, texts in documents.items():
        num_validation = max(2, min(len(texts) // 200, 400))
        validation[name], train[name] = texts[:num_validation], texts[num_validation:]
    return train, validation


def sample_for_tokenizer(train: Documents) -> list[str]:
    """A sample that no single source dominates."""
    rng = random.Random(_TOKENIZER_SEED)
    sample: list[str] = []
    for name, texts in train.items():
        most = _MAX_TOKENIZER_SYNTHETIC if name == SYNTHETIC else _MAX_TOKENIZER_DOCUMENTS
        sample += rng.sample(texts, min(len(texts), most))
    return sample


def _encode_and_report(tokenizer: Tokenizer, name: str, texts: list[str]) -> NDArray[np.uint16]:
    row = encode_documents(tokenizer, texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    print(f"{name:16s} {len(texts):6d} documents {num_bytes / 1e6:6.2f} MB {len(row):8d} tokens")
    return row


def _source_documents(name: str, sources: Path) -> list[str]:
    rng = random.Random(f"natural-{name}")
    documents = [
        document if isinstance(document, str) else render(document)
        for document in SOURCES[name](sources, rng)
    ]
    rng.shuffle(documents)
    return documents


def _synthetic_sample(seed: int, num_chars: int, facts: dict[str, Any]) -> list[str]:
    documents: list[str] = []
    length = 0
    for document in synthetic_documents(seed, facts_from_json(facts)):
        documents.append(document)
        length += len(document)
        if length >= num_chars:
            break
    return documents


if __name__ == "__main__":
    main()
