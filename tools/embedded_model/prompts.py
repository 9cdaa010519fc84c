"""Chat prompts that the embedded model was not trained on but should answer well."""

from itertools import islice
from typing import Final

from tools.embedded_model.facts import read_facts
from tools.embedded_model.synthetic.documents import synthetic_documents

_ANSWER: Final = "<|im_start|>assistant\n<think>\n"
_NO_REASONING: Final = "\n</think>\n\n"


def fresh_prompts(seed: int, count: int) -> list[str]:
    """Render `count` chats up to the answer that is due.

    A prompt ends with the header of the assistant and either an empty think block (reasoning
    off) or the opening of one (reasoning on), half of them each. Training draws its documents
    from integer seeds, prompts come from seeds of their own.
    """
    documents = synthetic_documents(f"fresh prompts {seed}", read_facts())
    chats = (document for document in documents if _ANSWER in document)
    return [_up_to_answer(chat) for chat in islice(chats, count)]


def _up_to_answer(chat: str) -> str:
    start = chat.rindex(_ANSWER) + len(_ANSWER)
    if chat.startswith(_NO_REASONING, start):
        return chat[:start] + _NO_REASONING
    return chat[:start]
