import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEFORE = (ROOT / "examples/flower/before/client_app.py").read_text().splitlines()
PRIVATE = (ROOT / "examples/flower/digits/client_app.py").read_text().splitlines()


def test_an_existing_client_becomes_private_in_at_most_five_changed_lines():
    changes = [line for line in difflib.ndiff(BEFORE, PRIVATE) if line[0] in "+-" and line[2:].strip()]
    assert 1 <= len(changes) <= 5


def test_the_guide_shows_the_change_as_it_is():
    diff = difflib.unified_diff(BEFORE, PRIVATE, "before/client_app.py", "digits/client_app.py", lineterm="")
    assert "\n".join(diff) in (ROOT / "docs/deploy.md").read_text()
