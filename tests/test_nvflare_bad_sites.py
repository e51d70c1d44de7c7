"""A federation whose sites answer by NVFlare's own executor, some of them set up wrongly, late, or gone."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare.apis", reason="NVFlare is not installed (extra `nvflare`)")

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.shareable import Shareable

from d2pfed.deploy.requests import RequestKind
from d2pfed.deploy.strategy import Strategy
from d2pfed.deploy.transport import Deadlines
from d2pfed.errors import TooFewClients
from d2pfed.ledger import RowKind, read_rows
from d2pfed.nvflare import executor as executors
from d2pfed.nvflare.sites import APP, app_digest
from d2pfed.nvflare.tasks import TaskEngine
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan

SITES = 6
ZEROS = {"params": np.zeros(DIMENSION, np.float32)}
SCRIPT = "step = 1\n"


@dataclass
class Kits:
    """Each site's startup kit and the job's code in it; tasks are answered at once, or in a thread if late."""

    root: object
    late: dict = field(default_factory=dict)  # by site, after how many seconds it answers training
    threads: list = field(default_factory=list)
    killed: set = field(default_factory=set)  # sites that answer no request after the announcement

    def require_running(self):
        pass

    def sites(self):
        return [f"site-{site}" for site in range(SITES)]

    def kit(self, site):
        return self.root / f"kit-{site}"

    def send(self, name, fields, seconds, answered):
        site = self.sites().index(name)
        if site in self.killed and fields["d2pfed.kind"] != RequestKind.ANNOUNCEMENT.value:
            return
        if site not in self.late:
            self.answer(site, name, fields, answered)
            return
        self.threads.append(threading.Thread(target=self.answer, args=(site, name, fields, answered)))
        self.threads[-1].start()

    def answer(self, site, name, fields, answered):
        kit = self.kit(site)
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(kit / "local"), get_app_dir=lambda _job: str(kit / "app")
        )
        context = SimpleNamespace(
            get_identity_name=lambda: name,
            get_prop=lambda key, *_: workspace if key == FLContextKey.WORKSPACE_OBJECT else None,
            get_job_id=lambda: "job",
        )

        def train(arrays, _settings):
            time.sleep(self.late.get(site, 0.0))
            params = arrays["params"].copy()
            params[site] += 1.0
            return {"params": params}

        answered(dict(executors.answer_task(Shareable(dict(fields)), context, lambda _purpose: train)))


@pytest.fixture
def kits(tmp_path, monkeypatch):
    monkeypatch.delenv("D2PFED_SIMULATION", raising=False)
    monkeypatch.setattr(executors, "is_log_streaming_allowed", lambda _: False)
    found = Kits(tmp_path)
    for site in range(SITES):
        app = found.kit(site) / "app"
        for part, content in (("custom/train.py", SCRIPT), ("config/config_fed_client.json", "{}")):
            (app / part).parent.mkdir(parents=True)
            (app / part).write_text(content)
    yield found
    for thread in found.threads:
        thread.join()


def train(kits, rounds=1, **changes):
    """Train, and return the parameters and what the server has logged of each node."""
    roster = enrol(kits.root, SITES, None)
    for site in range(SITES):
        (kits.kit(site) / "local").mkdir(exist_ok=True)
        directory_of(kits.root, site).rename(kits.kit(site) / "local" / "d2pfed")
    for change in changes.pop("spoil", []):
        change()
    strategy = Strategy(
        plan=make_plan(SITES, rounds),
        directory=kits.root / "run",
        roster=roster,
        deadlines=Deadlines(joining=20.0, keys=20.0, grace=2.0, poll=0.001),
        run_config={APP: app_digest(kits.kit(0) / "app")},
    )
    return strategy.train(TaskEngine(kits), ZEROS, over="NVFlare", **({"timeout": 20.0} | changes))["params"]


def kinds(kits):
    return [row.kind for row in read_rows(kits.root / "run" / "ledger.sqlite") if row.key is not None]


def without(params, site):
    """Whether a site's own coordinate did not move as the others' did."""
    others = [each for each in range(SITES) if each != site]
    return params[site] < params[others].min() - 0.05


def test_a_site_without_enrolment_is_left_out(kits, caplog):
    params = train(kits, spoil=[lambda: (kits.kit(5) / "local" / "d2pfed").rename(kits.root / "away")])
    assert without(params, 5)
    assert "this client is not set up; its own log says why" in caplog.text
    assert kinds(kits) == [RowKind.RESERVE, RowKind.COMMIT]


def test_a_site_with_other_code_is_left_out(kits, caplog):
    params = train(kits, spoil=[lambda: (kits.kit(4) / "app" / "custom" / "train.py").write_text("step = 2\n")])
    assert without(params, 4)
    assert "the configuration of the run must be that of the task" in caplog.text


def test_a_site_under_another_name_than_its_own_is_left_out(kits, caplog, monkeypatch):
    """A client signs the name that its own machine has; NVFlare's server knows the site by another."""
    answer = Kits.answer

    def renamed(self, site, name, fields, answered):
        answer(self, site, "site-9" if site == 3 else name, fields, answered)

    monkeypatch.setattr(Kits, "answer", renamed)
    assert without(train(kits), 3)
    assert "signature" in caplog.text


def test_a_site_that_is_killed_in_a_round_is_left_out(kits):
    kits.killed = {2}
    assert without(train(kits), 2)
    assert kinds(kits) == [RowKind.RESERVE, RowKind.COMMIT]


def test_a_vector_that_comes_after_its_round_is_in_no_sum(kits, caplog):
    kits.late = {1: 6.0}
    assert without(train(kits, rounds=5, timeout=4.0), 1)
    assert kinds(kits).count(RowKind.COMMIT) == 5
    assert "it was not asked, or is late" in caplog.text


def test_a_job_that_no_site_is_set_up_for_ends_and_costs_nothing(kits):
    away = [lambda each=each: (kits.kit(each) / "local" / "d2pfed").rename(kits.root / f"away-{each}")
            for each in range(SITES)]  # fmt: skip
    with pytest.raises(TooFewClients, match="nodes refuse: this client is not set up"):
        train(kits, spoil=away)
    assert kinds(kits) == []
