"""Small pieces of English: articles, numbers in words, enumerations, filled templates."""

from collections.abc import Iterable, Mapping

from tools.embedded_model.synthetic.lexicon import ORDINALS, SMALL_NUMBERS, TENS


class Word(str):
    """A string whose format specs are `a` (with article), `A` (capital article), `capital`."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == "a":
            return with_article(self)
        if spec == "A":
            return capital(with_article(self))
        if spec == "capital":
            return capital(self)
        return super().__format__(spec)


def fill(template: str, values: Mapping[str, object]) -> str:
    """Format a template; its strings accept the specs of `Word`."""
    words = {key: Word(v) if isinstance(v, str) else v for key, v in values.items()}
    return template.format_map(words)


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun, by its first letter."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(text: str) -> str:
    """Raise the first letter; unlike str.capitalize the others stay as they are."""
    return text[0].upper() + text[1:]


def uncapital(text: str) -> str:
    """Lower the first letter."""
    return text[0].lower() + text[1:]


def enumeration(items: Iterable[str]) -> str:
    """Join as "a, b and c"."""
    *head, last = items
    return ", ".join(head) + " and " + last if head else last


def ordinal(index: int) -> str:
    """Name the position of a 0-based index below 10."""
    return ORDINALS[index]


def number_words(n: int) -> str:
    """Write 0 <= n < 1,000,000 in words."""
    if n < 20:
        return SMALL_NUMBERS[n]
    if n < 100:
        return TENS[n // 10 - 2] + ("-" + SMALL_NUMBERS[n % 10] if n % 10 else "")
    if n < 1000:
        hundreds = SMALL_NUMBERS[n // 100] + " hundred"
        return hundreds + (" and " + number_words(n % 100) if n % 100 else "")
    thousands = number_words(n // 1000) + " thousand"
    return thousands + (" " + number_words(n % 1000) if n % 1000 else "")
