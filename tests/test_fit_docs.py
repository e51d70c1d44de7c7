"""The callbacks in the documents work with stand-ins for the packages that they need."""

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import d2pfed

PAGE = (Path(__file__).parent.parent / "docs" / "fit.md").read_text()
CALLBACKS = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)


def stand_ins(seen: list) -> dict[str, ModuleType]:
    board, mlflow, wandb = (ModuleType(name) for name in ("tensorboard", "mlflow", "wandb"))
    board.SummaryWriter = lambda _: SimpleNamespace(add_scalar=lambda name, value, at: seen.append((name, at)))
    mlflow.log_metrics = lambda metrics, step: seen.extend((name, step) for name in metrics)
    wandb.init = lambda project: None
    wandb.log = lambda metrics, step: seen.extend((name, step) for name in metrics)
    return {"torch.utils.tensorboard": board, "mlflow": mlflow, "wandb": wandb}


@pytest.mark.parametrize("code", CALLBACKS, ids=["tensorboard", "mlflow", "wandb"])
def test_a_callback_of_the_page_logs_every_round(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen: list = []
    for name, module in stand_ins(seen).items():
        monkeypatch.setitem(sys.modules, name, module)
    names: dict = {}
    exec(compile(code, "fit.md", "exec"), names)
    clients = [(x, (x[:, 0] > 0).long()) for x in torch.randn(20, 5, 3)]
    d2pfed.fit(
        torch.nn.Linear(3, 2),
        clients,
        privacy=None,
        rounds=2,
        cohort_size=5,
        validation=clients[0],
        run={"callbacks": [names["callback"]]},
    )
    assert {("loss", 1), ("accuracy", 1), ("loss", 2), ("accuracy", 2)} <= set(seen)


def test_the_page_has_three_callbacks():
    assert len(CALLBACKS) == 3


def test_each_example_is_at_most_ten_lines_beside_the_module():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.split("## Five models")[1].split("## Data")[0], re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        own = re.sub(r"^class .*?(?=^\w)", "", block, flags=re.DOTALL | re.MULTILINE)
        assert len([line for line in own.splitlines() if line.strip()]) <= 10, own


def test_the_example_trains_and_shows_a_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_model.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.count("FitResult after 8 rounds, complete") == 2
    pages = [page.read_text() for page in tmp_path.glob("runs/*/report.html")]
    assert sum("The baseline" in page for page in pages) == 1


def test_the_consortium_trains_with_a_guarantee_for_records(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["consortium.py", "3"])
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "consortium.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "silos of 11 to 219 records" in shown
    assert "(record, add-remove, each record of 20 silos by a secret coin" in shown
