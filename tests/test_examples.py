"""The examples and notebooks run as they are written, and end in a result."""

import json
import re
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
ENDS = {  # the others run in test_fit_docs.py and test_statistics.py at every commit
    "text.py": r"The next character is right in (\d+)%; a guess of the commonest, (\d+)%\.",
    "writers.py": r"in the clear: (\d+)% right.*\nepsilon 4: (\d+)% right",
    "lora.py": r"514 parameters, 1,152 bytes: (\d+)% right",
}


def test_no_example_hides_a_module_of_the_standard_library():
    """A script's own directory is searched first, so `statistics.py` would break every other example."""
    assert {file.stem for file in EXAMPLES} & sys.stdlib_module_names == set()
    assert "statistics" in sys.stdlib_module_names


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_an_example_ends_in_its_result(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    found = re.search(ENDS[name], shown)
    assert found is not None, shown
    assert int(found[1]) > 70
    assert re.search(r"epsilon against server: (3\.99\d*|4) at", shown)


SMALL = {"idx.py": ["images", "labels", "30"], "lstm.py": ["30"], "adapters.py": ["30"]}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_of_25_lines_runs_in_small(name, tmp_path, monkeypatch, capsys):
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 25
    pixels, labels = np.zeros((60, 28, 28), np.uint8), np.arange(60, dtype=np.uint8) % 10
    (tmp_path / "images").write_bytes(struct.pack(">4i", 0x803, 60, 28, 28) + pixels.tobytes())
    (tmp_path / "labels").write_bytes(struct.pack(">2i", 0x801, 60) + labels.tobytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    assert "complete" in shown
    assert re.search(r"validation: loss [\d.]+, accuracy [\d.]+", shown), shown


def cells(notebook: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def test_there_are_three_notebooks_that_end_in_plots():
    assert len(NOTEBOOKS) == 3
    for notebook in NOTEBOOKS:
        last = cells(notebook, "code")[-1]
        assert any("image/png" in output.get("data", {}) for output in last["outputs"]), notebook.name


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for cell in cells(notebook, "code"):
        exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
    assert pyplot.get_fignums()
    pyplot.close("all")
