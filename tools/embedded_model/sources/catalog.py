"""Every source by its name, in the order in which the training text joins them."""

from tools.embedded_model.sources.books import austen_novels, shakespeare_plays
from tools.embedded_model.sources.countries import country_texts
from tools.embedded_model.sources.dialogues import short_answers, small_talk
from tools.embedded_model.sources.dictionary import dictionary_entries
from tools.embedded_model.sources.documents import Source
from tools.embedded_model.sources.manuals import (
    django_manual,
    python_manual,
    sqlalchemy_manual,
    sqlite_manual,
)
from tools.embedded_model.sources.python_code import documented_functions, source_files

# The names seed the draws of a source, so they are part of the recipe.
SOURCES: dict[str, Source] = {
    "chitchat": small_talk,
    "chatterbot": short_answers,
    "factbook": country_texts,
    "wordnet": dictionary_entries,
    "python_docs": python_manual,
    "django_docs": django_manual,
    "sqlalchemy_docs": sqlalchemy_manual,
    "sqlite_docs": sqlite_manual,
    "austen": austen_novels,
    "shakespeare": shakespeare_plays,
    "python_code": source_files,
    "code_pairs": documented_functions,
}
