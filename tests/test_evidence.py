"""The page of evidence is the one that its results give."""

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = runpy.run_path(str(ROOT / "scripts" / "evidence"))


def test_page_and_survivors_are_those_of_the_results():
    found = EVIDENCE["results"]()
    assert (ROOT / "docs" / "evidence.md").read_text() == EVIDENCE["page"](found)
    kept = (ROOT / "docs" / "evidence" / "survivors.toml").read_text()
    assert kept == EVIDENCE["survivors_file"](found)
    assert all(mutant["why"] for sample in tomllib.loads(kept).values() for mutant in sample)


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
    assert "| [`scripts/campaign a 3`](evidence/a.json) | 3 of 3 | 0 |" in page
    assert "| [`scripts/campaign b`](evidence/b.json) | 5 sums | 0 |" in page
    assert "| [`scripts/campaign c`](evidence/c.json) | kills 10, lost 0 | 0 |" in page
    survivors = tomllib.loads(EVIDENCE["survivors_file"](found))
    assert survivors == {"d": [{"place": "f:", "was": "", "became": "", "why": "not looked at yet"}]}


def test_the_page_is_shorter_than_the_results_and_loses_no_failure():
    result = "9 sessions (3 dropped): 5 exact sums, void as foretold: seed 4; 1 wrong"
    found = {"result": result, "command": "scripts/campaign e 9 --seed nightly", "failed": 1}
    short = "9 sessions (3 dropped): 5 exact sums, the rest void as predicted; 1 wrong"
    assert EVIDENCE["line"](found, "e") == f"| [`scripts/campaign e 9`](evidence/e.json) | {short} | 1 |\n"


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
