"""What pages get while the site is built: formulas as MathML, and tables of settings from their descriptions."""

import pkgutil
import re
from typing import Any

from latex2mathml.converter import convert

from d2pfed.fields import default_in_words, descriptions

CODE_OR_FORMULA = re.compile(r"(```.*?```|`[^`\n]*`)|\$\$(.+?)\$\$|\$([^$\s](?:[^$]*?[^$\s])?)\$", re.DOTALL)
FIELDS = re.compile(r"^<!-- fields: (\S+) -->$", re.MULTILINE)

_formulas: list[str] = []


def on_page_markdown(markdown: str, **_page: Any) -> str:  # noqa: ANN401 - mkdocs' signature
    """Put a mark in the place of each formula outside of code, where Markdown would break lines, and make tables."""
    return FIELDS.sub(_table, CODE_OR_FORMULA.sub(_mark, markdown))


def on_page_content(html: str, **_page: Any) -> str:  # noqa: ANN401 - as above
    """Put the formulas in the places of their marks."""
    return re.sub(r"FORMULA(\d+)X", lambda match: _formulas[int(match[1])], html)


def _mark(match: re.Match[str]) -> str:
    code, block, inline = match.groups()
    if code is not None:
        return code
    _formulas.append(convert(" ".join((block or inline).split()), display="block" if block else "inline"))
    return f"FORMULA{len(_formulas) - 1}X"


def _table(match: re.Match[str]) -> str:
    rows = ["| field | meaning |", "|---|---|"]
    for each in descriptions(pkgutil.resolve_name(match[1])):
        later = f" {each.filled_in} fills it in." if each.filled_in else ""
        rows.append(f"| `{each.name}` | {each.help}{default_in_words(each)}{later} |")
    return "\n".join(rows)
