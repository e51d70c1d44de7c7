"""What a measured federation is made into: medians without the first round, ratios, and errors in their place."""

import json

import pytest

from benchmarks import deployment, tables
from benchmarks.deployment import NAMES, Case, DeploymentRow, Executor, Way, bench_deployment, cases
from d2pfed.errors import ConfigError


class Quiet:
    """A federation that says nothing."""

    def __init__(self, said: str = "") -> None:
        self.said = said

    def log(self, _name: str) -> str:
        return self.said


def row(way: Way, executor: Executor, clients: int, seconds: float) -> DeploymentRow:
    return DeploymentRow(
        what=NAMES[way],
        executor=executor.value,
        clients=clients,
        rounds=5,
        seconds=seconds,
        mean_seconds=seconds,
    )


def test_a_case_that_fails_is_a_row(monkeypatch):
    def measure(case, _patience):
        if case.way is Way.SECAGG:
            raise ConfigError("0 of 3 rounds were done")
        return row(case.way, case.executor, case.clients, 2.0)

    monkeypatch.setattr(deployment, "measure", measure)
    rows = list(bench_deployment(cases(5, 3, 20, 51)))
    assert [(each.what, each.executor, each.clients) for each in rows if each.error] == [
        (NAMES[Way.SECAGG], "warm", 5),
        (NAMES[Way.SECAGG], "stock", 5),
    ]
    assert len(rows) == 6
    assert tables.deployment_table(rows).row_count == 6


def test_goals_are_held_against_what_was_measured():
    rows = [row(way, Executor.WARM, 5, seconds) for way, seconds in zip(Way, (2.0, 5.0, 4.0, 8.0), strict=True)]
    rows += [row(Way.SECAGG, Executor.STOCK, 5, 50.0), row(Way.STANDING, Executor.WARM, 20, 6.0)]
    found = {goal.what: (goal.value, goal.met) for goal in deployment.goals(rows)}
    assert found == {
        "private round over FedAvg with evaluation": (2.5, True),
        "the same with standing keys": (2.0, False),
        "private round over SecAgg+, warm": (0.625, True),
        "with standing keys over SecAgg+, warm": (0.5, True),
        "private round over SecAgg+, stock": (0.1, True),
        "with standing keys over SecAgg+, stock": (0.08, True),
        "minutes for 500 rounds, 20 silos over 5 rounds": (50.0, False),
    }
    assert [goal.met for goal in deployment.goals([])] == [None] * 7
    assert tables.as_dict(deployment.goals(rows)[0])["met"] is True
    assert tables.deployment_goals_table(deployment.goals(rows)).row_count == 7


def test_the_first_round_of_a_run_does_not_count(tmp_path):
    lines = [{"exchanges": [{"name": "INVITATION", "seconds": seconds}]} for seconds in (90.0, 1.0, 3.0, 2.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "stages").write_text("train 7.0\nevaluate 9.0\ntrain 1.0\nevaluate 2.0\n")
    assert deployment._stages(tmp_path, tmp_path / "none") == {"INVITATION": 2.0}
    assert deployment._stages(tmp_path / "none", tmp_path / "stages") == {"train": 1.0, "evaluate": 2.0}
    with pytest.raises(ConfigError, match="must be at least 2, got 1"):
        Case(Way.PLAIN, Executor.WARM, 5, 1)


def test_a_federation_that_ends_early_or_never_is_said(tmp_path):
    times = tmp_path / "times"
    times.write_text("1.0\n2.5\n")
    assert deployment._wait(times, 2, 10.0, Quiet()) == [1.0, 2.5]
    with pytest.raises(ConfigError, match="1 of 2 rounds were done in 0 s"):
        deployment._wait(times, 3, 0.0, Quiet())
    times.write_text("1.0\n2.5\n4.0\n")
    assert deployment._wait(times, 9, 0.0, Quiet()) == [1.0, 2.5, 4.0]
    times.write_text("1.0\n2.5\n")
    with pytest.raises(ConfigError, match="the app ended after 1 of 2 rounds"):
        deployment._wait(times, 3, 10.0, Quiet("Finished task 7"))
