"""reStructuredText and the HTML of one manual, as Markdown."""

import html
import re
import textwrap
from collections.abc import Callable

_CODE = re.compile(
    r"^\s*\.\. (code-block|code|sourcecode|doctest|highlight|testcode|testsetup|console)::"
)
_ADMONITIONS = {
    "note": "Note: ",
    "warning": "Warning: ",
    "tip": "Tip: ",
    "versionadded": "New in version ",
    "versionchanged": "Changed in version ",
    "seealso": "See also: ",
    "deprecated": "Deprecated since version ",
    "admonition": "",
    "important": "Important: ",
}
_ADMONITION = re.compile(rf"^\s*\.\. ({'|'.join(_ADMONITIONS)})::\s*(.*)$")
_API_ENTRY = re.compile(
    r"^\s*\.\. (?:py:)?(?:function|method|class|data|attribute|exception|staticmethod|classmethod|"
    r"module|option|describe|setting|templatetag|templatefilter)::\s*(.*)$"
)
_DIRECTIVE = re.compile(r"^\s*\.\.( |$)")
_UNDERLINE = re.compile(r"^([=\-~^\"'*+#`.])\1{2,}\s*$")
_RULER = re.compile(r"^([=\-~^\"'*+#])\1{3,}\s*$")
_HEADING_MARKS = {"=": "#", "*": "#", "#": "#", "-": "##"}

# A reader takes the lines and an index; it returns the Markdown lines and the index after what it
# has read, or None if nothing of its kind is there.
_Read = tuple[list[str], int] | None


def markdown_of_rst(text: str) -> str:
    """Convert reStructuredText: code, notes, headings and roles; other directives are dropped.

    Most fences lose a backtick to the rule for inline code: the published model has seen them
    so, and it stays.
    """
    lines = text.replace("\r", "").split("\n")
    out: list[str] = []
    i = 0
    while i < len(lines):
        for reader in _READERS:
            read = reader(lines, i)
            if read is not None:
                markdown, i = read
                out += markdown
                break
    return re.sub(r"\n{3,}", "\n\n", _plain_roles("\n".join(out))).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _code_block(lines: list[str], start: int) -> _Read:
    if not _CODE.match(lines[start]):
        return None
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or re.match(r"^\s+:\w", lines[end])):
        end += 1
    code: list[str] = []
    while end < len(lines) and (
        not lines[end].strip() or _indent(lines[end]) > _indent(lines[start])
    ):
        code.append(lines[end])
        end += 1
    if not code:
        return [], end
    language = lines[start].split("::")[1].strip()
    language = language.replace("pycon", "python").replace("default", "")
    dedented = textwrap.dedent("\n".join(code)).strip("\n")
    return [f"```{language}", *dedented.split("\n"), "```", ""], end


def _admonition(lines: list[str], start: int) -> _Read:
    match = _ADMONITION.match(lines[start])
    return ([_ADMONITIONS[match.group(1)] + match.group(2)], start + 1) if match else None


def _api_entry(lines: list[str], start: int) -> _Read:
    match = _API_ENTRY.match(lines[start])
    return ([f"`{match.group(1).strip()}`"], start + 1) if match else None


def _dropped_directive(lines: list[str], start: int) -> _Read:
    """Drop a directive or a comment with its body."""
    if not _DIRECTIVE.match(lines[start]):
        return None
    end = start + 1
    while end < len(lines) and lines[end].strip() and _indent(lines[end]) > _indent(lines[start]):
        end += 1
    return [], end


def _heading(lines: list[str], start: int) -> _Read:
    title = lines[start].strip()
    underline = lines[start + 1] if start + 1 < len(lines) else ""
    if not title or not _UNDERLINE.match(underline) or len(underline.strip()) < len(title) - 2:
        return None
    mark = _HEADING_MARKS.get(underline.strip()[0], "###")
    return [f"{mark} {title}"], start + 2


def _ruler(lines: list[str], start: int) -> _Read:
    return ([], start + 1) if _RULER.match(lines[start]) else None


def _paragraph_line(lines: list[str], start: int) -> _Read:
    line = lines[start]
    if line.strip() == "::":
        return [], start + 1
    return [line.rstrip()[:-1] if line.rstrip().endswith("::") else line], start + 1


_READERS: tuple[Callable[[list[str], int], _Read], ...] = (
    _code_block,
    _admonition,
    _api_entry,
    _dropped_directive,
    _heading,
    _ruler,
    _paragraph_line,
)


def _plain_roles(text: str) -> str:
    text = re.sub(r":[\w:+-]+:`~?([^`<]+?)\s*<[^`>]+>`", r"`\1`", text)
    text = re.sub(r":[\w:+-]+:`[~!]?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]+>`_+", r"\1", text)
    return re.sub(r"\|(\w+)\|", r"\1", text)


def markdown_of_html(text: str) -> str:
    """Convert a page of the SQLite manual: headings, code, lists and paragraphs."""
    text = re.sub(
        r"(?is)<div class=.?(nosearch|searchmenu|mobilemenu|desktoponly).?.*?</div>", "", text
    )
    body = re.search(r"(?is)<body[^>]*>(.*)</body>", text)
    text = body.group(1) if body else text
    text = re.sub(r"(?is)<(script|style|svg)[^>]*>.*?</\1>", "", text)
    text = re.sub(r"(?is)<h([1-4])[^>]*>(.*?)</h\1>", _html_heading, text)
    text = re.sub(
        r"(?is)<pre[^>]*>(.*?)</pre>",
        lambda match: "\n\n```\n" + match.group(1).strip("\n") + "\n```\n\n",
        text,
    )
    # Odd parts are the code blocks.
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    parts[::2] = [_html_paragraphs(part) for part in parts[::2]]
    parts[1::2] = [re.sub(r"<[^>]+>", "", part) for part in parts[1::2]]
    text = html.unescape("\n\n".join(part for part in parts if part.strip()))
    if "\n# " in text[:6000]:
        text = re.sub(r"(?s)^.*?(?=\n# |^# )", "", text, count=1)
    text = re.sub(r"(?m)^(#+) [\d.]+ ", r"\1 ", text)
    return text.replace("\u00a0", " ").strip()


def _html_heading(match: re.Match[str]) -> str:
    title = re.sub(r"<[^>]+>|\s+", " ", match.group(2)).strip()
    return f"\n\n{'#' * int(match.group(1))} {title}\n\n"


def _html_paragraphs(text: str) -> str:
    text = re.sub(r"(?is)<li[^>]*>", "\n\n- ", text)
    text = re.sub(r"(?is)<(p|div|tr|dt|dd|blockquote|table|ul|ol)\b[^>]*>", "\n\n", text)
    text = re.sub(r"(?is)<[^>]+>", "", text)
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    return "\n\n".join(re.sub(r"\s+", " ", part).strip() for part in paragraphs)
