"""Poems, jokes, riddles and emails."""

from random import Random

from tools.embedded_model.synthetic.chat import (
    Exercise,
    chat_document,
    exercise_document,
    request_variant,
)
from tools.embedded_model.synthetic.language import fill
from tools.embedded_model.synthetic.lexicon import (
    FOODS,
    JOBS,
    JOKES,
    NAMES,
    RIDDLES,
    WEEKDAYS,
    read_table,
)

_POEMS = read_table("poems")
_EMAILS: list[dict[str, str]] = read_table("emails")["emails"]


def poem(rng: Random) -> str:
    """One to three stanzas of four lines, in rhyming pairs."""
    stanzas = [_stanza(rng) for _ in range(rng.randint(1, 3))]
    request = rng.choice(
        [
            "Write a poem.",
            "Write a short poem.",
            "Can you write a poem?",
            "Write a poem about nature.",
            "Write a small poem for me.",
            "Please write a rhyming poem.",
        ]
    )
    turns = [request_variant(rng, request), "\n\n".join(stanzas)]
    return chat_document(rng, turns, "I write a short poem with pairs of lines that rhyme.")


def _stanza(rng: Random) -> str:
    first, second = (
        [_POEMS["lines"][word] for word in rng.sample(rng.choice(_POEMS["rhymes"]), 2)]
        for _ in range(2)
    )
    continued = first[1].replace("It is", "it is", 1)
    return f"{first[0]},\n{continued}.\n{second[0]},\n{second[1]}."


def jokes(rng: Random) -> str:
    """One to three jokes or riddles."""
    turns: list[str] = []
    for i in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            setup, punchline = rng.choice(JOKES)
            another = "Tell me another joke." if i else "Do you know a good joke?"
            request = rng.choice(["Tell me a joke.", another, "Make me laugh."])
            turns += [request, f"{setup} {punchline}"]
        else:
            riddle, solution = rng.choice(RIDDLES)
            request = rng.choice(
                ["Give me a riddle.", "Tell me a riddle.", "Do you know a riddle?"]
            )
            reply = rng.choice(["I do not know.", "What is the answer?", "I give up."])
            turns += [request, riddle, reply, f"The answer is: {solution}"]
    return chat_document(rng, turns)


def email(rng: Random) -> str:
    """A short email with a given purpose."""
    sender, receiver = rng.sample(NAMES, 2)
    day = rng.choice(WEEKDAYS)
    template = rng.choice(_EMAILS)
    words = {
        "receiver": receiver,
        "day": day,
        "food": rng.choice(FOODS),
        "gift": rng.choice(["scarf", "book", "cup", "lamp", "blanket"]),
        "job": rng.choice(JOBS),
        "offer": rng.choice(["bike", "table", "sofa", "camera", "guitar"]),
    }
    purpose, subject, body = (fill(template[key], words) for key in ("purpose", "subject", "body"))
    request = rng.choice(
        [
            f"Write an email to {purpose}.",
            f"Write a short email to {purpose}.",
            f"Help me to write an email to {purpose}.",
            f"Please write a message to {purpose}.",
        ]
    ) + rng.choice(["", f" My name is {sender}.", f" Sign it as {sender}."])
    closing = rng.choice(["Best regards", "Kind regards", "Yours", "Many thanks"])
    signature = sender if sender in request else "[Your name]"
    text = f"Subject: {subject}\n\nDear {receiver},\n\n{body}\n\n{closing},\n{signature}"
    reasoning = f"I write a short and polite email to {receiver}."
    return exercise_document(rng, Exercise(request, text, reasoning))
