"""The figures that an operator watches, out of a run."""

import re

import numpy as np
import pytest
from safetensors.numpy import load

pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")

from flwr.app import Error, Message, MetricRecord

from d2pfed.deploy import transport
from support.enrolled_clients import enrol, make_plan
from support.local_grid import make_grid, make_strategy, start

PLANTED = 'evil"} 1\nd2pfed_epsilon_charged 0'


def samples(text: str) -> dict[str, float]:
    """The samples of a Prometheus text; a line that is none is refused."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            form = r'([a-z_0-9]+)\{run="run-[0-9a-f]{16}"(?:,([a-z]+="[A-Za-z_ ]+"))?\} (\S+)'
            name, label, value = re.fullmatch(form, line).groups()
            found[f"{name}{{{label}}}" if label else name] = float(value)
    return found


def test_a_run_leaves_its_figures_for_prometheus(tmp_path):
    plan, roster, grid = make_plan(rounds=2), enrol(tmp_path, 5), make_grid(tmp_path)
    refused = []

    def refuse_once(client, reply):
        if client == 4 and len(refused) < 2:
            refused.append(client)
            return Message(Error(code=0, reason=PLANTED), reply_to=grid.sent[-1]) if len(refused) == 2 else reply
        return reply

    grid.coming = refuse_once
    start(make_strategy(plan, tmp_path, roster), grid)
    found = samples((tmp_path / "run" / "metrics.prom").read_text())
    assert (found["d2pfed_rounds_total"], found["d2pfed_rounds_planned"]) == (2, 2)
    assert found["d2pfed_survivors"] == found["d2pfed_cohort_clients"] == 5
    assert found['d2pfed_refusals_total{rule="refused or failed"}'] == 1
    assert 0 < found["d2pfed_epsilon_charged"] <= found["d2pfed_epsilon_planned"]
    assert found['d2pfed_exchange_answers{exchange="MASK_REQUEST"}'] == 5
    assert found["d2pfed_updated_seconds"] > 1e9


def test_the_figures_are_renewed_while_the_server_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "_ALIVE_SECONDS", 0.0)
    plan, roster, grid = make_plan(rounds=1), enrol(tmp_path, 5), make_grid(tmp_path)
    file, seen = tmp_path / "run" / "metrics.prom", []

    def look(_client, reply):
        seen.append(file.exists())
        file.unlink(missing_ok=True)
        return reply

    grid.coming = look
    start(make_strategy(plan, tmp_path, roster), grid)
    assert sum(seen) >= 3  # once or more in each exchange of the only round


def test_the_best_model_is_kept_beside_the_last(tmp_path):
    plan, roster, grid = make_plan(rounds=3), enrol(tmp_path, 5), make_grid(tmp_path)
    models, scores = {}, {0: 0.9, 1: 0.1, 2: 0.3, 3: 0.2}

    def evaluate(number, arrays):
        models[number] = arrays["params"].numpy()
        return MetricRecord({"accuracy": scores[number]})

    start(make_strategy(plan, tmp_path, roster), grid, 2, evaluate_fn=evaluate, best="accuracy")
    start(make_strategy(plan, tmp_path, roster), grid, evaluate_fn=evaluate, best="accuracy")
    kept = load((tmp_path / "run" / "best.safetensors").read_bytes())["params"]
    last = load((tmp_path / "run" / "model.safetensors").read_bytes())["params"]
    assert np.array_equal(kept, models[2])
    assert np.array_equal(last, models[3])


def test_a_text_with_a_clients_words_would_be_noticed():
    with pytest.raises(AttributeError):
        samples(f'd2pfed_refusals_total{{run="run-{"0" * 16}",rule="{PLANTED}"}} 1')
