"""Exercises about words and short lists: sort, count, spell, change, compare."""

from collections.abc import Callable
from random import Random

from tools.embedded_model.synthetic.chat import Exercise, chat_document, request_variant
from tools.embedded_model.synthetic.language import capital, enumeration, number_words, ordinal
from tools.embedded_model.synthetic.lexicon import (
    ANIMALS,
    ANTONYMS,
    CATEGORIES,
    CATEGORY_MEMBERS,
    FRUITS,
    PAST_TENSES,
    PLURALS,
    SYNONYMS,
    WORDS,
)


def word_exercise(rng: Random) -> str:
    """One exercise about three to eight words, or about one of them."""
    num_words = rng.randint(3, 8)
    words = rng.sample(WORDS + FRUITS + ANIMALS, num_words)
    exercise = rng.choice(_EXERCISES)(rng, words)
    turns = [request_variant(rng, exercise.question), exercise.answer]
    return chat_document(rng, turns, exercise.reasoning)


def _sort_words(rng: Random, words: list[str]) -> Exercise:
    listed = ", ".join(words)
    is_reversed = rng.random() >= 0.85
    in_order = sorted(words, reverse=is_reversed)
    questions = [
        f"Sort these words alphabetically: {listed}",
        f"Sort the words {listed} in alphabetical order.",
        f"Put these words in alphabetical order: {listed}",
        f"Arrange alphabetically: {listed}",
    ]
    if is_reversed:
        questions = [f"Sort these words in reverse alphabetical order: {listed}"]
    question = rng.choice(questions)
    if rng.random() < 0.6:
        answer = ", ".join(in_order)
    else:
        answer = "\n".join(f"{i + 1}. {word}" for i, word in enumerate(in_order))
    letters = ", ".join(word[0] for word in words)
    reasoning = f"The words start with {letters}. In order: {', '.join(in_order)}."
    return Exercise(question, answer, reasoning)


def _sort_numbers(rng: Random, _words: list[str]) -> Exercise:
    num_numbers = rng.randint(3, 8)
    numbers = [rng.randint(0, 200) for _ in range(num_numbers)]
    listed = ", ".join(map(str, numbers))
    is_ascending = rng.random() < 0.7
    if is_ascending:
        questions = [
            f"Sort these numbers: {listed}",
            f"Sort {listed} from smallest to largest.",
            f"Put these numbers in ascending order: {listed}",
        ]
    else:
        questions = [
            f"Sort {listed} from largest to smallest.",
            f"Sort these numbers in descending order: {listed}",
        ]
    answer = ", ".join(map(str, sorted(numbers, reverse=not is_ascending)))
    reasoning = f"The smallest is {min(numbers)} and the largest is {max(numbers)}."
    return Exercise(rng.choice(questions), answer, reasoning)


def _reverse_list(rng: Random, words: list[str]) -> Exercise:
    listed = ", ".join(words)
    questions = [f"Reverse this list: {listed}", f"Write these words in reverse order: {listed}"]
    reasoning = "I start with the last word and go back to the first."
    return Exercise(rng.choice(questions), ", ".join(words[::-1]), reasoning)


def _count_words(rng: Random, words: list[str]) -> Exercise:
    listed = ", ".join(words)
    questions = [f"How many words are in this list: {listed}?", f"Count the words: {listed}"]
    counted = ", ".join(f"{i + 1} {word}" for i, word in enumerate(words))
    answer = f"There are {len(words)} words in the list."
    return Exercise(rng.choice(questions), answer, f"I count: {counted}.")


def _find_position(rng: Random, words: list[str]) -> Exercise:
    listed = ", ".join(words)
    i = rng.randrange(len(words))
    position = "last" if i == len(words) - 1 else ordinal(i)
    questions = [
        f"What is the {position} word in this list: {listed}?",
        f"Which word is {position}: {listed}?",
    ]
    answers = [f"The {position} word is {words[i]}.", f"It is {words[i]}."]
    reasoning = f"The list is {listed}. The {position} word is {words[i]}."
    return Exercise(rng.choice(questions), rng.choice(answers), reasoning)


def _count_letters(rng: Random, words: list[str]) -> Exercise:
    word = rng.choice(words)
    questions = [
        f"How many letters are in the word {word}?",
        f'How many letters does "{word}" have?',
        f"Count the letters in {word}.",
    ]
    counted = " ".join(f"{letter}-{i + 1}" for i, letter in enumerate(word))
    reasoning = f"{word}: {counted}. That is {len(word)} letters."
    return Exercise(rng.choice(questions), f'The word "{word}" has {len(word)} letters.', reasoning)


def _spell(rng: Random, words: list[str]) -> Exercise:
    word = rng.choice(words)
    questions = [f"Spell the word {word}.", f"Spell {word}.", f"How do you spell {word}?"]
    return Exercise(rng.choice(questions), "-".join(word.upper()))


def _change_case(rng: Random, words: list[str]) -> Exercise:
    word = rng.choice(words)
    questions = [f"Write {word} in uppercase.", f'Convert "{word}" to uppercase.']
    question = rng.choice(questions)
    if rng.random() < 0.5:
        return Exercise(f"Write {word.upper()} in lowercase.", word)
    return Exercise(question, word.upper())


def _repeat(rng: Random, words: list[str]) -> Exercise:
    word, times = rng.choice(words), rng.randint(2, 6)
    questions = [
        f"Repeat the word {word} {times} times.",
        f"Say {word} {times} times.",
        f"Write {word} {number_words(times)} times.",
    ]
    return Exercise(rng.choice(questions), " ".join([word] * times))


def _either_way(rng: Random, pairs: tuple[tuple[str, str], ...]) -> tuple[str, str]:
    a, b = rng.choice(pairs)
    return (a, b) if rng.random() < 0.5 else (b, a)


def _antonym(rng: Random, _words: list[str]) -> Exercise:
    a, b = _either_way(rng, ANTONYMS)
    questions = [
        f"What is the opposite of {a}?",
        f"Give me the opposite of {a}.",
        f'What is the antonym of "{a}"?',
    ]
    return Exercise(rng.choice(questions), f"The opposite of {a} is {b}.")


def _synonym(rng: Random, _words: list[str]) -> Exercise:
    a, b = _either_way(rng, SYNONYMS)
    questions = [f"What is another word for {a}?", f"Give me a synonym for {a}."]
    answers = [f"Another word for {a} is {b}.", f"A synonym for {a} is {b}."]
    return Exercise(rng.choice(questions), rng.choice(answers))


def _plural(rng: Random, _words: list[str]) -> Exercise:
    one, many = rng.choice(PLURALS)
    if rng.random() < 0.6:
        return Exercise(f"What is the plural of {one}?", f"The plural of {one} is {many}.")
    return Exercise(f"What is the singular of {many}?", f"The singular of {many} is {one}.")


def _past_tense(rng: Random, _words: list[str]) -> Exercise:
    now, then = rng.choice(PAST_TENSES)
    questions = [f"What is the past tense of {now}?", f'Give me the past tense of "{now}".']
    return Exercise(rng.choice(questions), f"The past tense of {now} is {then}.")


def _odd_one_out(rng: Random, _words: list[str]) -> Exercise:
    category = rng.choice(list(CATEGORIES))
    members = rng.sample(CATEGORIES[category], 3)
    others = [
        name
        for name, entries in CATEGORIES.items()
        if name != category and not set(entries) & set(CATEGORIES[category])
    ]
    other = rng.choice(others)
    odd = rng.choice(CATEGORIES[other])
    shown = [*members, odd]
    rng.shuffle(shown)
    listed = ", ".join(shown)
    questions = [f"Which word does not belong: {listed}?", f"Find the odd one out: {listed}"]
    answer = f"{capital(odd)} does not belong. The others are {category}."
    reasoning = f"{enumeration(members)} are {category}, but {odd} is {CATEGORY_MEMBERS[other]}."
    return Exercise(rng.choice(questions), answer, reasoning)


_EXERCISES: tuple[Callable[[Random, list[str]], Exercise], ...] = (
    *(_sort_words, _sort_words, _sort_words),
    _sort_numbers,
    _reverse_list,
    _count_words,
    _find_position,
    _count_letters,
    _spell,
    _change_case,
    _repeat,
    _antonym,
    _synonym,
    _plural,
    _past_tense,
    _odd_one_out,
)
