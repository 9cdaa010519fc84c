"""Human small talk and short questions with answers."""

import json
import random
import re
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.embedded_model.render import Message
from tools.embedded_model.sources.documents import Document, find_one
from tools.embedded_model.sources.filters import is_personal, is_unwanted
from tools.embedded_model.synthetic.lexicon import read_table

_SPELLINGS: dict[str, str] = read_table("spellings")["spellings"]
# They keep the tone of these chats apart from the answers of an assistant.
_SYSTEM_LINES = (
    "You are a person having a casual chat.",
    "You are chatting with a friend.",
    "This is a casual conversation between two people.",
)
_QUESTION = re.compile(
    r"(what|how|why|where|when|who|do|does|did|are|is|have|has|can|would|could|will|which|whats)\b",
    re.IGNORECASE,
)
_TOPICS = (
    "coding computers food greetings health money science tech_support trivia psychology sports "
    "history literature conversations"
)


def small_talk(folder: Path, rng: random.Random) -> Iterator[Document]:
    """chitchat-dataset (MIT, BYU PCC lab): chats of two people, cut where the filters refuse."""
    with zipfile.ZipFile(find_one(folder / "pypi", "chitchat_dataset-*.whl")) as wheel:
        chats = json.loads(wheel.read("chitchat_dataset/dataset.json"))
    for key in sorted(chats):
        turns = _clean_turns(chats[key]["messages"])
        if len(turns) < 4 or len({sender for sender, _ in turns}) != 2:
            continue
        lines = _merge_turns(turns)
        if len(lines) >= 4:
            yield [
                {"role": "system", "content": rng.choice(_SYSTEM_LINES)},
                *_alternate(lines),
            ]


def _clean_turns(messages: Iterable[list[dict[str, str]]]) -> list[tuple[str, str]]:
    """(sender, text) of every turn before the first one that the filters refuse."""
    turns = []
    for fragments in messages:
        texts = [fragment["text"] for fragment in fragments]
        raw = " ".join(texts)
        if is_unwanted(raw) or is_personal(raw):
            break
        if text := tidy_utterance(texts):
            turns.append((fragments[0]["sender"], text))
    return turns


def _merge_turns(turns: list[tuple[str, str]]) -> list[str]:
    """Join what one person says in a row."""
    lines: list[str] = []
    previous = None
    for sender, text in turns:
        if sender == previous:
            lines[-1] += " " + text
        else:
            lines.append(text)
        previous = sender
    return lines


def _alternate(lines: list[str]) -> list[Message]:
    """Messages of user and assistant in turn, the last one an assistant's."""
    whole = lines[: len(lines) // 2 * 2]
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": line}
        for i, line in enumerate(whole)
    ]


def tidy_utterance(fragments: Iterable[str]) -> str:
    """Join the fragments of a turn as sentences: plain ASCII, full words, an end mark."""
    sentences = []
    for fragment in fragments:
        text = re.sub(r"\s+", " ", fragment).strip()
        text = text.encode("ascii", "ignore").decode().strip()
        if not text:
            continue
        text = re.sub(r"\b[A-Za-z]+\b(?!')", lambda m: _SPELLINGS.get(m[0], m[0]), text)
        text = re.sub(r"([!?.])\1{2,}", r"\1", text)
        text = text[0].upper() + text[1:]
        if text[-1].isalnum():
            text += "?" if _QUESTION.match(text) else "."
        sentences.append(text)
    return " ".join(sentences)


def short_answers(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """chatterbot-corpus (BSD-3-Clause): some of its English questions and answers."""
    with zipfile.ZipFile(find_one(folder / "pypi", "chatterbot_corpus-*.whl")) as wheel:
        for topic in _TOPICS.split():
            text = wheel.read(f"chatterbot_corpus/data/english/{topic}.yml").decode()
            for chat in _chats_of_yaml(text):
                lines = [_yaml_scalar(line) for line in chat]
                if all(lines) and not any(map(is_unwanted, lines)) and len(lines) >= 2:
                    yield list(_alternate(lines))


def _chats_of_yaml(text: str) -> list[list[str]]:
    """Read the one shape of these files, lists of lists of strings, without a YAML parser."""
    chats: list[list[str]] = []
    for line in text.split("\n"):
        if first := re.match(r"^\s{0,2}- - (.*)$", line):
            chats.append([first.group(1)])
        elif not chats:
            continue
        elif line.startswith("  - "):
            chats[-1].append(line[4:])
        elif line.strip() and line.startswith("    "):
            chats[-1][-1] += "\n" + line[4:]
    return chats


def _yaml_scalar(text: str) -> str:
    text = text.rstrip()
    if text.startswith(("|", ">")):
        return textwrap.dedent(text.split("\n", 1)[1] if "\n" in text else "").strip()
    return re.sub(r"\s*\n\s*", " ", text).strip().strip("'\"").replace("''", "'")
