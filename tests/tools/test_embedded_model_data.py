"""The training data of the embedded model: sources, tokenizer, rows."""

import shutil
from itertools import islice
from pathlib import Path

import numpy as np

from tools.embedded_model.facts import FACTS_PATH, read_facts
from tools.embedded_model.sources.dialogues import tidy_utterance
from tools.embedded_model.sources.markup import markdown_of_html, markdown_of_rst
from tools.embedded_model.synthetic.documents import synthetic_documents
from tools.embedded_model.tokenizer import encode_documents, train_tokenizer
from tools.embedded_model.training.rows import natural_rows, synthetic_blocks


def test_small_talk_is_tidied() -> None:
    """S1. Oracle: the tidied text, written by hand."""
    assert tidy_utterance(["hi  im   TOM", "", "how r u", "wow!!!!!"]) == (
        "Hi I'm TOM. How are you? Wow!"
    )


def test_rst_becomes_markdown() -> None:
    """S1. Oracle: the Markdown, written by hand."""
    rst = """Title
=====

.. note:: Mind the gap.

.. function:: f(x)

   Calls :func:`~os.path.join` and ``g``; see `here <http://x>`_ ::

.. code-block:: python
   :linenos:

   a = 1

     b = 2

.. index:: dropped
   with its body

After
"""
    assert markdown_of_rst(rst) == (
        "# Title\n\nNote: Mind the gap.\n\n`f(x)`\n\n   Calls `os.path.join` and `g`; see here :"
        "\n\n``python\na = 1\n\n  b = 2\n``\n\nAfter"
    )


def test_html_becomes_markdown() -> None:
    """S1. Oracle: the Markdown, written by hand."""
    page = (
        "<html><body><p>menu</p><h1>The <i>Page</i></h1><p>One\n two &amp; three"
        "<ul><li>x<li>y</ul><pre>\nselect <b>1</b>;\n</pre><h2>1.2 More</h2></body></html>"
    )
    assert markdown_of_html(page).strip() == (
        "# The Page\n\nOne two & three\n\n- x\n\n- y\n\n```\nselect 1;\n```\n\n## More"
    )


def test_tokenizer_gives_back_the_text_and_puts_added_tokens_last() -> None:
    """S1. Oracle: the text itself; ids from 0 to the vocabulary size."""
    texts = ["Hello, it's 12:30!\n  def f(x):\n\treturn x ", "naïve café", "Since 2024 and 2024"]
    tokenizer = train_tokenizer(texts * 3, 300)
    size = tokenizer.get_vocab_size()
    names = [tokenizer.id_to_token(i) for i in range(size - 9, size)]
    assert names[:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
    ids = encode_documents(tokenizer, texts)
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "".join(
        text + "<|endoftext|>" for text in texts
    )
    assert len(tokenizer.encode("2024").ids) == 4


def test_rows_begin_with_documents(tmp_path: Path) -> None:
    """S1. Oracle: the decoded rows against the documents of the same seed."""
    facts = read_facts()
    texts = list(islice(synthetic_documents(1, facts), 60))
    tokenizer = train_tokenizer(texts, 400)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(FACTS_PATH, tmp_path / "facts.json")
    np.save(tmp_path / "natural_train.npy", encode_documents(tokenizer, texts))
    starts = {text[:20] for text in islice(synthetic_documents(2, facts), 512)}
    block = next(synthetic_blocks(2, tmp_path, 50, 16))
    assert block.shape == (16, 50)
    for row in block.tolist():
        assert tokenizer.decode(row, skip_special_tokens=False)[:20] in starts
    rows = list(islice(natural_rows(tmp_path, 40, np.random.default_rng(0)), 100))
    assert {len(row) for row in rows} == {40}
    starts = {text[:20] for text in texts}
    decoded = [tokenizer.decode(row.tolist(), skip_special_tokens=False)[:20] for row in rows]
    assert sum(start in starts for start in decoded) > 50
