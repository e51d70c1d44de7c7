"""What pages get while the site is built: formulas as MathML, and tables of settings from their descriptions."""

import pkgutil
import re
from typing import Any

from latex2mathml.converter import convert

from d2pfed.fields import default_in_words, descriptions

CODE_OR_FORMULA = re.compile(r"(```.*?```|`[^`\n]*`)|\$\$(.+?)\$\$|\$([^$\s](?:[^$]*?[^$\s])?)\$", re.DOTALL)
CELL = re.compile(r"<td>(?=((?:(?!</td>).)*))", re.DOTALL)
LONG_NAME = re.compile(r"<code>[^<\s]{25,}")
INLINE_CODE = re.compile(r"<code>[^<]*</code>")
OPTION = re.compile(r"(?<![\w-])--\w[\w-]*")
PICTURE = re.compile(r'(<img [^>]*src="([^"]+)"[^>]*>)')
FIELDS = re.compile(r"^<!-- fields: (\S+) -->$", re.MULTILINE)
LONG = 40  # characters of a formula in a line of text that may be wider than a phone

_formulas: list[str] = []


def on_page_markdown(markdown: str, **_page: Any) -> str:  # noqa: ANN401 - mkdocs' signature
    """Put a mark in the place of each formula outside of code, where Markdown would break lines, and make tables."""
    return FIELDS.sub(_table, CODE_OR_FORMULA.sub(_mark, markdown))


def on_page_content(html: str, **_page: Any) -> str:  # noqa: ANN401 - as above
    """Put the formulas in the places of their marks, and help phones: pictures open, names and options stay whole."""
    html = CELL.sub(lambda match: '<td class="wide">' if LONG_NAME.search(match[1]) else "<td>", html)
    html = re.sub(r"FORMULA(\d+)X", lambda match: _formulas[int(match[1])], html)
    html = INLINE_CODE.sub(lambda match: OPTION.sub(r'<span class="option">\g<0></span>', match[0]), html)
    return PICTURE.sub(r'<a href="\2">\1</a>', html)


def _mark(match: re.Match[str]) -> str:
    code, block, inline = match.groups()
    if code is not None:
        return code
    latex = " ".join((block or inline).split())
    formula = convert(latex, display="block" if block else "inline")
    if block or len(latex) > LONG:
        formula = f'<span class="{"formula" if block else "formula-long"}">{formula}</span>'  # see extra.css
    _formulas.append(formula)
    return f"FORMULA{len(_formulas) - 1}X"


def _table(match: re.Match[str]) -> str:
    rows = ["| field | meaning |", "|---|---|"]
    for each in descriptions(pkgutil.resolve_name(match[1])):
        later = f" {each.filled_in} fills it in." if each.filled_in else ""
        rows.append(f"| `{each.name}` | {each.help}{default_in_words(each)}{later} |")
    return "\n".join(rows)
