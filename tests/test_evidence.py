"""The page of evidence is the one that its results give."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = runpy.run_path(str(ROOT / "scripts" / "evidence"))


def test_the_pages_are_those_of_their_results():
    found = EVIDENCE["results"]()
    assert (ROOT / "docs" / "evidence.md").read_text() == EVIDENCE["page"](found)
    assert (ROOT / "docs" / "evidence" / "survivors.md").read_text() == EVIDENCE["survivors_page"](found)


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
    assert "## mutants\n" in EVIDENCE["survivors_page"](found)


def campaign(*arguments) -> int:
    program = [sys.executable, ROOT / "scripts" / "campaign", *arguments]
    return subprocess.run(program, capture_output=True, check=False, timeout=120).returncode


def test_a_campaign_that_fails_leaves_no_older_success(tmp_path):
    kept = tmp_path / "result.json"
    kept.write_text('{"campaign": "kills", "result": "3 of 3", "failed": 0}')
    assert campaign("ledger-unknown", "1", "--json", kept) != 0
    found = json.loads(kept.read_text())
    assert (found["failed"], found["result"]) == (1, "it failed")


def test_a_campaign_of_nothing_is_refused_and_one_says_its_commit(tmp_path):
    kept = tmp_path / "result.json"
    assert campaign("ledger-stops", "0", "--json", kept) == 2
    assert campaign("ledger-stops", "1", "--json", kept) == 0
    found = json.loads(kept.read_text())
    assert (found["failed"], found["stops"]) == (0, 1)
    assert "commit" in found
