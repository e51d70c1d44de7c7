"""The page of evidence is the one that its results give."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = runpy.run_path(str(ROOT / "scripts" / "evidence"))


def test_the_page_is_that_of_its_results():
    assert (ROOT / "docs" / "evidence.md").read_text() == EVIDENCE["page"](EVIDENCE["results"]())


def test_every_campaign_has_a_line_whatever_it_prints():
    found = {
        "a": {"campaign": "kills", "command": "scripts/campaign a 3", "result": "3 of 3", "failed": 0},
        "b": {"campaign": "sessions", "seed": "1", "counted": "5 sums"},
        "c": {"kills": 10, "lost": 0},
        "d": {
            "campaign": "mutants",
            "result": "1 of 2",
            "failed": 1,
            "details": [{"verdict": "survived", "file": "f"}],
        },
    }
    page = EVIDENCE["page"](found)
    assert "| kills | 3 of 3 | 0 | `scripts/campaign a 3` |" in page
    assert "| sessions | 5 sums | 0 | `scripts/campaign b` |" in page
    assert "| c | kills 10, lost 0 | 0 | `scripts/campaign c` |" in page
    assert "Survivors: mutants" in page
