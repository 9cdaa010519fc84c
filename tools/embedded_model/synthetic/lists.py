"""Lists of things, and what belongs to which category."""

from random import Random

from tools.embedded_model.synthetic.chat import (
    Exercise,
    chat_document,
    exercise_document,
    request_variant,
)
from tools.embedded_model.synthetic.language import (
    capital,
    enumeration,
    number_words,
    ordinal,
    with_article,
)
from tools.embedded_model.synthetic.lexicon import (
    CATEGORIES,
    CATEGORY_MEMBERS,
    CLOTHES,
    FURNITURE,
)

_WITHOUT_ARTICLE = ("colors", "cities", "sports")


def item_list(rng: Random) -> str:
    """Two to ten things of a category, sometimes with a question about the list."""
    category = rng.choice(list(CATEGORIES))
    num_items = min(rng.randint(2, 10), len(CATEGORIES[category]))
    items = rng.sample(CATEGORIES[category], num_items)
    in_words = number_words(num_items)
    question = rng.choice(
        [
            f"Give me {num_items} {category}.",
            f"Name {num_items} {category}.",
            f"List {num_items} {category}.",
            f"Can you name {in_words} {category}?",
            f"Tell me {in_words} {category}.",
            f"I need a list of {num_items} {category}.",
        ]
    )
    answer = rng.choice(
        [
            ", ".join(items),
            "\n".join(f"{i + 1}. {capital(item)}" for i, item in enumerate(items)),
            "\n".join(f"- {capital(item)}" for item in items),
            f"Here are {in_words} {category}: {enumeration(items)}.",
        ]
    )
    turns = [request_variant(rng, question), answer]
    if rng.random() < 0.3:
        i = rng.randrange(num_items)
        questions = [f"What was the {ordinal(i)} one?", f"Which one was {ordinal(i)}?"]
        turns += [rng.choice(questions), capital(items[i]) + "."]
    elif rng.random() < 0.15:
        turns += ["Sort them alphabetically.", ", ".join(sorted(items))]
    reasoning = f"I look at my list: {', '.join(items)}."
    if len(turns) == 2:
        chosen = enumeration(items[:3])
        reasoning = f"The user wants {num_items} {category}. I choose {chosen} and so on."
    return chat_document(rng, turns, reasoning)


def classification(rng: Random) -> str:
    """What kind of thing something is, or whether a review is positive."""
    return _category_question(rng) if rng.random() < 0.5 else _review_question(rng)


def _category_question(rng: Random) -> str:
    category = rng.choice([name for name in CATEGORIES if name != "foods"])
    thing = rng.choice(CATEGORIES[category])
    others = [name for name in CATEGORIES if name != category and thing not in CATEGORIES[name]]
    options = [*rng.sample(others, 2), category]
    rng.shuffle(options)
    first, second, third = (CATEGORY_MEMBERS[option] for option in options)
    one = thing if category in _WITHOUT_ARTICLE else with_article(thing)
    questions = [
        f"Is {thing} {first}, {second} or {third}?",
        f"What is {one}?",
        f"Which category fits {thing}: {', '.join(options)}?",
    ]
    answer = f"{capital(one)} is {CATEGORY_MEMBERS[category]}."
    return exercise_document(rng, Exercise(rng.choice(questions), answer, answer))


def _review_question(rng: Random) -> str:
    is_positive = rng.random() < 0.5
    reviews = [
        "I hate this {thing}. It broke after a day.",
        "The {thing} was terrible and much too expensive.",
        "What an ugly {thing}. I am very disappointed.",
        "This is the worst {thing} that I have ever had.",
    ]
    if is_positive:
        reviews = [
            "I love this {thing}. It is wonderful!",
            "The {thing} was great and very useful.",
            "What a beautiful {thing}! I am very happy with it.",
            "This is the best {thing} that I have ever had.",
        ]
    review = rng.choice(reviews)
    things = (*CLOTHES, *FURNITURE, "book", "movie", "phone", "hotel", "restaurant")
    review = review.format(thing=rng.choice(things))
    questions = [
        f"Is this review positive or negative? {review}",
        f"Classify the sentiment of this text as positive or negative: {review}",
        f"Sentiment (positive/negative): {review}",
    ]
    question = rng.choice(questions)
    sentiment = "positive" if is_positive else "negative"
    answer = rng.choice([sentiment, f"The review is {sentiment}."])
    tone = "friendly" if is_positive else "unfriendly"
    reasoning = f"The words in the text are {tone}, so it is {sentiment}."
    return exercise_document(rng, Exercise(question, answer, reasoning))


def membership(rng: Random) -> str:
    """A yes-or-no question about a category."""
    category = rng.choice(list(CATEGORIES))
    thing = rng.choice(CATEGORIES[category])
    is_member = rng.random() < 0.5
    asked = category
    if not is_member:
        others = [name for name in CATEGORIES if thing not in CATEGORIES[name] and name != category]
        asked = rng.choice(others)
    fact = f"{thing} is {CATEGORY_MEMBERS[category]}"
    answer = f"Yes, {fact}." if is_member else f"No, {fact}, not {CATEGORY_MEMBERS[asked]}."
    question = f"Is {thing} {CATEGORY_MEMBERS[asked]}?"
    return exercise_document(rng, Exercise(question, answer, f"{capital(fact)}."))
