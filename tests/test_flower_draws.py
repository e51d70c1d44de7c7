import json
import stat
from dataclasses import replace

import pytest

from crash_moments import Disk, lay_out
from d2pfed.errors import ConfigError
from d2pfed.flower.draws import Committed, Draws, make_draws
from d2pfed.numerics.randomness import digest
from homes import enrol


@pytest.fixture
def draws(tmp_path):
    signed = enrol(tmp_path, 3, depth=5)
    return Draws(tmp_path / "draws", signed.roster)


def again(draws, folder) -> Draws:
    """The same draws, read by another process."""
    made = object.__new__(Draws)
    made.tree, made._used = draws.tree, folder / "draws.used"
    return made


def test_no_draw_serves_two_runs(draws, tmp_path):
    assert draws.reserve("one", 10) == 0
    assert again(draws, tmp_path).reserve("two", 12) == 10
    assert again(draws, tmp_path).reserve("one", 10) == 0  # resumed
    assert again(draws, tmp_path).reserve("three", 10) == 22
    with pytest.raises(ConfigError, match="a run needs 1 draws, and 0 are left"):
        draws.reserve("four", 1)
    with pytest.raises(ConfigError, match="run one has 10 draws, and now asks for 11"):
        draws.reserve("one", 11)


def test_draws_are_used_up_durably_before_they_are_known(draws, tmp_path, monkeypatch):
    first = []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: len(first))
        for run in ("one", "two", "three"):
            draws.reserve(run, 4)
            first.append(run)
        disk._note("end")
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            where = lay_out(tmp_path / "crashed" / f"{place}-{name}", files)
            assert again(draws, where).reserve("later", 1) >= 4 * moment.sent


def test_the_secret_is_for_its_owner_alone_and_never_overwritten(draws, tmp_path):
    assert stat.S_IMODE((tmp_path / "draws").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="holds draws already"):
        make_draws(tmp_path / "draws")
    (tmp_path / "draws").chmod(0o640)
    with pytest.raises(ConfigError, match="readable by its owner alone"):
        Draws(tmp_path / "draws", None)


def test_a_roster_for_other_draws_is_refused(tmp_path):
    signed = enrol(tmp_path, 3, depth=5)
    with pytest.raises(ConfigError, match="was signed for other draws"):
        Draws(tmp_path / "draws", replace(signed.roster, root=digest("another root")))
    with pytest.raises(ConfigError, match="holds no draws"):
        Draws(tmp_path / "nowhere", signed.roster)


def test_a_damaged_record_is_refused(draws, tmp_path):
    draws.reserve("one", 1)
    for text in ("[]", "{", json.dumps({"one": 3})):
        (tmp_path / "draws.used").write_text(text)
        with pytest.raises(ConfigError, match="record of used draws is damaged"):
            draws.reserve("two", 1)


@pytest.mark.parametrize("text", ["", "12", "12:00", "x:" + "00" * 32, "21:" + "00" * 32, "-1:" + "00" * 32])
def test_what_the_server_has_committed_to_is_read_exactly(text):
    with pytest.raises(ConfigError, match="draws are DEPTH:ROOT"):
        Committed.decode(text)
    good = Committed(12, digest("root"))
    assert Committed.decode(good.encode()) == good


@pytest.mark.parametrize("depth", [-1, 21])
def test_a_tree_has_at_most_a_million_draws(tmp_path, depth):
    with pytest.raises(ConfigError, match=r"a depth in \[0, 20\]"):
        make_draws(tmp_path / "draws", depth)
    assert list(tmp_path.iterdir()) == []
