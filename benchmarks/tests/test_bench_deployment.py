"""What a measured federation is made into: medians without the first round, ratios, and errors in their place."""

import json

import pytest

from benchmarks import deployment, tables
from benchmarks.deployment import Executor, Way, bench_deployment
from d2pfed.errors import ConfigError


class Quiet:
    """A federation that says nothing."""

    def __init__(self, said: str = "") -> None:
        self.said = said

    def log(self, _name: str) -> str:
        return self.said


def test_rows_have_ratios_and_errors(monkeypatch):
    measured = {Way.PLAIN: (2.0, {}), Way.PRIVATE: (5.0, {"INVITATION": 1.0})}

    def measure(way, _executor, _clients, _rounds, _patience):
        if way is Way.SECAGG:
            raise ConfigError("0 of 3 rounds were done")
        return measured[way]

    monkeypatch.setattr(deployment, "measure", measure)
    plain, private, secagg = bench_deployment(5, 3, [Executor.WARM])
    assert (plain.ratio, private.ratio, secagg.ratio) == (None, 2.5, None)
    assert (private.met, secagg.met, secagg.error) == (True, None, "0 of 3 rounds were done")
    assert tables.as_dict(private)["met"] is True
    assert tables.deployment_table([plain, private, secagg]).row_count == 3


def test_the_first_round_of_a_run_does_not_count(tmp_path):
    lines = [{"exchanges": [{"name": "INVITATION", "seconds": seconds}]} for seconds in (90.0, 1.0, 3.0, 2.0)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    assert deployment._exchanges(tmp_path) == {"INVITATION": 2.0}
    assert deployment._exchanges(tmp_path / "nothing") == {}
    with pytest.raises(ConfigError, match="must be at least 2, got 1"):
        deployment.measure(Way.PLAIN, Executor.WARM, 5, 1, 1.0)


def test_a_federation_that_ends_early_or_never_is_said(tmp_path):
    times = tmp_path / "times"
    times.write_text("1.0\n2.5\n")
    assert deployment._wait(times, 2, 10.0, Quiet()) == [1.0, 2.5]
    with pytest.raises(ConfigError, match="1 of 2 rounds were done in 0 s"):
        deployment._wait(times, 3, 0.0, Quiet())
    with pytest.raises(ConfigError, match="the app ended after 1 of 2 rounds"):
        deployment._wait(times, 3, 10.0, Quiet("Finished task 7"))
