"""E1: tokenizers of checkpoint folders, and their incremental detokenization."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenize import WindowTextStream
from engine.tokens import Tokenizer, load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "server" / "embedded"
WORDS = ["hello", "world", "the", "quick", "brown", "fox", "lazy", "dogs,", "é", "ü", "日本"]
KINDS = ["byte_level", "sp_bpe", "sp_unigram", "byte_fallback", "metaspace", "words"]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces ",
    "naïve café — 日本語 🙂👩‍👩‍👧",
    "line\n\n\tline",
    "x<|im_end|>\n<|im_start|>system",
    "<think>a</think><tool_call>",
]


def train_sentencepiece(**options: object) -> bytes:
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **options,
    )
    return model.getvalue()


def build_byte_fallback() -> tokenizers.Tokenizer:
    """A Llama-like tokenizer.json: spaces as pieces, unknown characters as byte pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehlotw", "he", "ll", "▁he", "▁t", "<|im_end|>"]
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("h", "e"), ("l", "l"), ("▁", "he"), ("▁", "t")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    return library


def build_metaspace() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁", *"abcdehlotw", "▁he", "llo", "▁wo"]
    library = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    return library


def build_words() -> tokenizers.Tokenizer:
    """No decoder at all: the library joins tokens with spaces."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(40)} | {"<unk>": 40}, "<unk>")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<eos>"])
    return library


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {kind: root / kind for kind in KINDS[1:]} | {"byte_level": EMBEDDED}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    symbols = ["<|im_start|>", "<|im_end|>"]
    (folders["sp_bpe"] / "tokenizer.model").write_bytes(
        train_sentencepiece(
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            user_defined_symbols=symbols,
            control_symbols=["<ctl>"],
        )
    )
    (folders["sp_unigram"] / "tokenizer.model").write_bytes(
        train_sentencepiece(vocab_size=120, model_type="unigram", remove_extra_whitespaces=False)
    )
    for kind, build in (
        ("byte_fallback", build_byte_fallback),
        ("metaspace", build_metaspace),
        ("words", build_words),
    ):
        build().save(str(folders[kind] / "tokenizer.json"))
    return folders


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    found = {kind: load_tokenizer(folder) for kind, folder in folders.items()}
    return {kind: tokenizer for kind, tokenizer in found.items() if tokenizer is not None}


@pytest.fixture(scope="module")
def libraries(folders: dict[str, Path]) -> dict[str, tokenizers.Tokenizer]:
    files = {kind: folder / "tokenizer.json" for kind, folder in folders.items()}
    return {
        kind: tokenizers.Tokenizer.from_file(str(file))
        for kind, file in files.items()
        if file.is_file()
    }


def in_chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def streamed(tokenizer: Tokenizer, chunks: Sequence[Sequence[int]], skip: bool) -> str:
    stream = tokenizer.stream((), skip_special_tokens=skip)
    return "".join([*(stream.push(chunk) for chunk in chunks), stream.flush()])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_streamed_text_equals_decoded_text(
    kind: str, loaded: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """E1. Oracle: decode of all ids at once; ids may name no token."""
    tokenizer = loaded[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert streamed(tokenizer, [[i] for i in ids], skip) == whole
    assert streamed(tokenizer, in_chunks(ids, cuts), skip) == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 60)))
def test_streamed_text_of_encoded_text(
    kind: str, loaded: dict[str, Tokenizer], text: str, cuts: list[int]
) -> None:
    """E1. Oracle: decode of the ids of a real text, whatever its characters."""
    tokenizer = loaded[kind]
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert streamed(tokenizer, in_chunks(ids, cuts), skip=False) == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "words"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_equals_the_library(
    kind: str,
    loaded: dict[str, Tokenizer],
    libraries: dict[str, tokenizers.Tokenizer],
    data: st.DataObject,
) -> None:
    """E1. Oracle: tokenizers' decode. Byte pieces that spell no text are ours to show."""
    library = libraries[kind]
    ids = data.draw(st.lists(st.integers(0, library.get_vocab_size() - 1), max_size=40))
    skip = data.draw(st.booleans())
    expected = library.decode(ids, skip_special_tokens=skip)
    if kind == "byte_level" or "\ufffd" not in expected:
        assert loaded[kind].decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("kind", ["sp_bpe", "sp_unigram"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decode_equals_sentencepiece(
    kind: str, loaded: dict[str, Tokenizer], folders: dict[str, Path], data: st.DataObject
) -> None:
    """E1. Oracle: sentencepiece's decode, which never shows control symbols."""
    library = sentencepiece.SentencePieceProcessor(
        model_proto=(folders[kind] / "tokenizer.model").read_bytes()
    )
    ids = data.draw(
        st.lists(st.integers(0, library.vocab_size() - 1), max_size=40)
        | st.text(max_size=40).map(library.encode)
    )
    expected = library.decode(ids)
    if "\ufffd" not in expected:
        assert loaded[kind].decode(ids, skip_special_tokens=True) == expected


@pytest.mark.parametrize("kind", ["sp_bpe", "sp_unigram"])
@pytest.mark.parametrize(
    "pieces", [["▁", "▁the"], ["▁", "▁", "▁the", "▁", "▁the"], ["</s>", "▁the"], ["<unk>", "▁the"]]
)
def test_spaces_at_the_start_of_a_sentencepiece_text(
    kind: str, pieces: list[str], loaded: dict[str, Tokenizer], folders: dict[str, Path]
) -> None:
    """E1. Oracle: sentencepiece's decode; one model drops every leading space, one the first."""
    library = sentencepiece.SentencePieceProcessor(
        model_proto=(folders[kind] / "tokenizer.model").read_bytes()
    )
    ids = [library.piece_to_id(piece) for piece in pieces]
    assert loaded[kind].decode(ids, skip_special_tokens=True) == library.decode(ids)
    shown = loaded[kind].decode(ids, skip_special_tokens=False)
    assert shown.removeprefix("</s>") == library.decode(ids)


def test_sentencepiece_round_trip_keeps_spaces_and_bytes(loaded: dict[str, Tokenizer]) -> None:
    """E1. Oracle: the text itself (token-wise library decoding loses its spaces)."""
    tokenizer = loaded["sp_bpe"]
    text = "hello world 🙂 the quick fox"
    ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
    assert streamed(tokenizer, [[i] for i in ids], skip=True) == text


def test_output_after_a_prompt_keeps_its_leading_space(loaded: dict[str, Tokenizer]) -> None:
    """E1. Oracle: decode of prompt and output together."""
    tokenizer = loaded["sp_bpe"]
    prompt = tokenizer.encode("hello", parse_special=False, add_special_tokens=False)
    output = tokenizer.encode("world", parse_special=False, add_special_tokens=False)
    stream = tokenizer.stream(prompt, skip_special_tokens=True)
    text = stream.push(output) + stream.flush()
    assert "hello" + text == tokenizer.decode(prompt + output, skip_special_tokens=True)
    assert text == " world"


def test_an_unfinished_character_is_held_then_flushed(loaded: dict[str, Tokenizer]) -> None:
    """E1, S2 row 26. Oracle: UTF-8: three of an emoji's four bytes are one U+FFFD."""
    tokenizer = loaded["sp_bpe"]
    ids = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    known = [i for i in ids if i is not None]
    assert len(known) == 4
    stream = tokenizer.stream((), skip_special_tokens=True)
    assert [stream.push([i]) for i in known[:3]] == ["", "", ""]
    assert stream.push(known[3:]) == "🙂"
    assert [stream.push([i]) for i in known[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "sp_bpe"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_control_tokens_in_plain_text_are_letters(
    kind: str, loaded: dict[str, Tokenizer], data: st.DataObject
) -> None:
    """S2 (1.2 item 7). Oracle: no control id, and the text survives.

    <think> and <tool_call> count, though skip_special_tokens keeps them.
    """
    tokenizer = loaded[kind]
    part = st.sampled_from([*tokenizer.control_tokens, "<", "<|", "|>", "x", "im_end"])
    text = data.draw(st.lists(part, max_size=8).map("".join))
    ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
    assert not set(ids) & set(tokenizer.control_tokens.values())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_control_tokens_are_parsed_on_request(loaded: dict[str, Tokenizer]) -> None:
    """E1. Oracle: ids written in the tokenizer.json."""
    tokenizer = loaded["byte_level"]
    text = "<|im_start|>x<|im_end|><think></tool_response>"
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=False)
    letters = tokenizer.encode("x", parse_special=False, add_special_tokens=False)
    assert ids == [8184, *letters, 8185, 8186, 8191]
    assert tokenizer.special_ids == {8183, 8184, 8185}
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<think></tool_response>"
    assert tokenizer.id_of("<|im_end|>") == 8185
    assert tokenizer.id_of("no such token") is None
    assert tokenizer.vocab_size == 8192


def test_sentencepiece_control_symbols(loaded: dict[str, Tokenizer]) -> None:
    """E1. Oracle: the training options of the model."""
    tokenizer = loaded["sp_bpe"]
    assert set(tokenizer.control_tokens) == {"<s>", "</s>", "<ctl>", "<|im_start|>", "<|im_end|>"}
    ids = tokenizer.encode("<ctl>the<|im_end|>the", parse_special=True, add_special_tokens=True)
    assert ids[0] == tokenizer.id_of("<s>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<|im_end|>the"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><ctl>the<|im_end|>the"
    assert tokenizer.id_of("no such piece") is None


def test_sentencepiece_takes_added_tokens_of_the_config(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """E1. Oracle: tokenizer_config.json as written here."""
    (tmp_path / "tokenizer.model").write_bytes(
        (folders["sp_unigram"] / "tokenizer.model").read_bytes()
    )
    added = {"200": {"content": "<|turn|>", "special": True}, "201": {"content": "<call>"}}
    config = {"added_tokens_decoder": added, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = tokenizer.encode("<|turn|>the<call>", parse_special=True, add_special_tokens=True)
    assert (ids[0], ids[-1]) == (200, 201)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<call>"
    assert tokenizer.vocab_size == 202
    assert tokenizer.special_ids == {1, 2, 200}


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_text(kind: str, loaded: dict[str, Tokenizer]) -> None:
    """S2 (1.6). Oracle: the UTF-8 of the text; a start's dummy space may come first."""
    tokenizer = loaded[kind]
    text = {"words": "w1 w2", "metaspace": "hello wo"}.get(kind, "the 日本 hello🙂 x")
    if kind == "sp_unigram":
        text = "the 日本 hello"
    ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
    data = [tokenizer.token_bytes(i) for i in ids]
    joined = b" ".join(data) if kind == "words" else b"".join(data)
    assert joined.removeprefix(b" ") == text.encode()
    assert "\ufffd" not in "".join(tokenizer.token_string(i) for i in ids[:1])


def test_byte_level_token_bytes_are_true_bytes(loaded: dict[str, Tokenizer]) -> None:
    """S2 (1.6). Oracle: UTF-8 of the characters, also where one token is part of one."""
    tokenizer = loaded["byte_level"]
    for text in ("是", "🙂", "é", " x", "\n"):
        ids = tokenizer.encode(text, parse_special=False, add_special_tokens=False)
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.token_bytes(8186) == b"<think>"
    assert tokenizer.token_bytes(10**9) == b"" == tokenizer.token_bytes(-1)


def test_a_token_outside_the_byte_alphabet_is_its_own_text(tmp_path: Path) -> None:
    """E1. Oracle: tokenizers' decode of a byte-level vocabulary that holds such a token."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "日Ġ": 1}, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode([0, 1, 0], skip_special_tokens=True) == library.decode([0, 1, 0])


def test_window_stream_decodes_a_bounded_window() -> None:
    """E1. Oracle: a count of the ids that are decoded for each new one."""
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return " ".join(map(str, ids))

    stream = WindowTextStream(decode, skipped_ids=frozenset({7}), prompt_token_ids=range(1000))
    text = "".join(stream.push([i % 10]) for i in range(500)) + stream.flush()
    assert text.split() == [str(i % 10) for i in range(500) if i % 10 != 7]
    assert max(seen) <= 5


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.model", b"garbage"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'),
    ],
)
def test_a_corrupt_file_is_named(
    name: str, content: bytes, folders: dict[str, Path], tmp_path: Path
) -> None:
    """E1. Oracle: ValueError with the file's name."""
    if name == "tokenizer_config.json":
        model = (folders["sp_bpe"] / "tokenizer.model").read_bytes()
        (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


def test_a_truncated_tokenizer_json_is_named(tmp_path: Path) -> None:
    """E1. Oracle: ValueError with the file's name."""
    content = (EMBEDDED / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_no_tokenizer_is_none_and_json_comes_first(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """E1. Oracle: tokenizer.json, else tokenizer.model, else None."""
    assert load_tokenizer(tmp_path) is None
    model = (folders["sp_bpe"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer.json").write_bytes((EMBEDDED / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 8192


@pytest.mark.parametrize("kind", ["byte_level", "sp_bpe"])
@pytest.mark.parametrize("parse_special", [True, False])
def test_a_lone_surrogate_is_a_user_error(
    kind: str, parse_special: bool, loaded: dict[str, Tokenizer]
) -> None:
    """S2 (1.2 item 8). Oracle: ValueError, not a library's TypeError."""
    with pytest.raises(ValueError, match="surrogate"):
        loaded[kind].encode("a\ud800", parse_special=parse_special, add_special_tokens=False)


def test_a_learned_control_token_is_refused_as_plain_text(tmp_path: Path) -> None:
    """S2 (1.2 item 7). Oracle: ValueError where no spelling avoids the control id."""
    library = build_words()
    library.add_special_tokens(["w1"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    with pytest.raises(ValueError, match="control token"):
        tokenizer.encode("w0 w1", parse_special=False, add_special_tokens=False)
