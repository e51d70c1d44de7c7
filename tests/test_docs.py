"""Every Python block in the README and the documents runs, and prints what the document says it prints."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?", re.DOTALL)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize(("page", "code", "output"), BLOCKS, ids=[f"{b[0]}-{i}" for i, b in enumerate(BLOCKS)])
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, code, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    assert output is None or printed.getvalue() == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
