"""Requests for SQL statements over a few small tables."""

from dataclasses import dataclass
from random import Random

from tools.embedded_model.synthetic.chat import Exercise, exercise_document
from tools.embedded_model.synthetic.lexicon import CITIES, NAMES, WORDS


@dataclass(frozen=True)
class _Table:
    name: str
    columns: tuple[str, ...]

    @property
    def numbers(self) -> list[str]:
        return [x for x in self.columns if x in _NUMBER_COLUMNS]

    @property
    def texts(self) -> list[str]:
        return [x for x in self.columns if x not in _NUMBER_COLUMNS and x != "id"]

    @property
    def definition(self) -> str:
        types = {"id": " INTEGER PRIMARY KEY", **dict.fromkeys(self.numbers, " INTEGER")}
        columns = ",\n  ".join(column + types.get(column, " TEXT") for column in self.columns)
        return f"CREATE TABLE {self.name} (\n  {columns}\n);"


_NUMBER_COLUMNS = ("age", "price", "year", "pages", "salary", "stock", "grade")
_NAME_COLUMNS = ("name", "author", "customer")
_TABLES = (
    _Table("users", ("id", "name", "age", "city", "email")),
    _Table("orders", ("id", "customer", "product", "price", "date")),
    _Table("books", ("id", "title", "author", "year", "pages")),
    _Table("employees", ("id", "name", "salary", "department", "city")),
    _Table("products", ("id", "name", "price", "stock", "category")),
    _Table("students", ("id", "name", "grade", "school", "age")),
)


def sql_query(rng: Random) -> str:
    """A statement that does what the user describes."""
    table = rng.choice(_TABLES)
    does, statement = rng.choice(_statements(rng, table))
    question = rng.choice(
        [
            f"Write an SQL query that {does}.",
            f"Give me an SQL statement that {does}.",
            f"SQL query that {does}",
            f"I have a table {table.name} with the columns {', '.join(table.columns)}. "
            f"Write a query that {does}.",
        ]
    )
    exercise = Exercise(question, f"```sql\n{statement}\n```", f"The query {does}.")
    return exercise_document(rng, exercise)


def _statements(rng: Random, table: _Table) -> list[tuple[str, str]]:
    """(what it does, statement) for random columns and values of the table."""
    t = table.name
    number, text = rng.choice(table.numbers), rng.choice(table.texts)
    value = rng.randint(1900, 2020) if number == "year" else rng.randint(1, 100)
    word = rng.choice(CITIES if text == "city" else NAMES if text in _NAME_COLUMNS else WORDS)
    limit, row = rng.randint(2, 20), rng.randint(1, 50)
    everything, count = f"SELECT * FROM {t}", "COUNT(*)"
    columns = ", ".join(table.columns)
    return [
        (f"selects all rows of the table {t}", f"{everything};"),
        (f"selects the {text} of all {t}", f"SELECT {text} FROM {t};"),
        (
            f"selects all {t} where {number} is greater than {value}",
            f"{everything} WHERE {number} > {value};",
        ),
        (
            f"selects all {t} where {number} is less than {value}",
            f"{everything} WHERE {number} < {value};",
        ),
        (f"selects the {t} with the {text} '{word}'", f"{everything} WHERE {text} = '{word}';"),
        (f"counts the rows of {t}", f"SELECT {count} FROM {t};"),
        (f"computes the average {number} of the {t}", f"SELECT AVG({number}) FROM {t};"),
        (f"finds the largest {number} in {t}", f"SELECT MAX({number}) FROM {t};"),
        (f"sorts the {t} by {number}", f"{everything} ORDER BY {number};"),
        (
            f"sorts the {t} by {number} in descending order",
            f"{everything} ORDER BY {number} DESC;",
        ),
        (f"counts the {t} for each {text}", f"SELECT {text}, {count} FROM {t} GROUP BY {text};"),
        (f"shows the first {limit} {t}", f"{everything} LIMIT {limit};"),
        (
            f"deletes the {t} where {number} is {value}",
            f"DELETE FROM {t} WHERE {number} = {value};",
        ),
        (
            f"sets {number} to {value} for the row with id {row} in {t}",
            f"UPDATE {t} SET {number} = {value} WHERE id = {row};",
        ),
        (f"creates the table {t} with the columns {columns}", table.definition),
    ]
