from concurrent.futures import ThreadPoolExecutor

from d2pfed.deploy import rosters as positions
from d2pfed.deploy.rosters import Positions
from d2pfed.numerics.randomness import digest
from d2pfed.secagg.roster import Position
from support.crash_moments import Disk, lay_out


def position(count: int, life: str = "one") -> Position:
    return Position(count, digest("head", count, life), digest(count) * 2)


KEYS = {client: digest("key", client) for client in (*range(50), (1 << 64) - 1)}


def memory_in(folder, keys=KEYS) -> Positions:
    return Positions(folder / "peers", keys)


def test_the_highest_count_of_each_client_is_remembered(tmp_path):
    memory = memory_in(tmp_path)
    assert memory.latest() == {}
    memory.keep({1: position(5), 2: position(7)})
    memory.keep({1: position(6), 2: position(3), (1 << 64) - 1: position(1)})
    assert memory_in(tmp_path).latest() == {1: position(6), 2: position(7), (1 << 64) - 1: position(1)}


def test_an_older_or_forked_position_does_not_replace_the_latest(tmp_path):
    memory = memory_in(tmp_path)
    memory.keep({1: position(5)})
    memory.keep({1: position(4, "restored")})
    memory.keep({1: position(5, "a clone")})
    assert memory.latest() == {1: position(5)}


def test_a_record_that_a_crash_cut_short_is_left_out_and_nothing_else(tmp_path):
    memory = memory_in(tmp_path)
    memory.keep({1: position(5)})
    memory.keep({2: position(6)})
    data = (tmp_path / "peers").read_bytes()
    (tmp_path / "peers").write_bytes(data[:-1])
    assert memory.latest() == {1: position(5)}
    memory.keep({3: position(7)})
    assert memory.latest() == {1: position(5), 3: position(7)}


def test_what_was_kept_survives_a_power_cut(tmp_path, monkeypatch):
    memory, kept = memory_in(tmp_path), []
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched, lambda: len(kept))
        for count in range(4):
            memory.keep({1: position(count)})
            kept.append(count)
        disk._note("end")
    for place, moment in enumerate(disk.moments):
        for name, files in (("kill", moment.after_kill), ("power", moment.after_power_cut)):
            found = memory_in(lay_out(tmp_path / "crashed" / f"{place}-{name}", files)).latest()
            assert found.get(1, position(0)).count >= moment.sent - 1


def test_the_file_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(positions, "_SPARE_RECORDS", 8)
    memory = memory_in(tmp_path)
    for count in range(200):
        memory.keep({1: position(count), 2: position(count)})
    assert memory.latest() == {1: position(199), 2: position(199)}
    assert (tmp_path / "peers").stat().st_size < 20 * 120


def test_processes_side_by_side_lose_nothing(tmp_path):
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda client: memory_in(tmp_path).keep({client: position(client)}), range(40)))
    assert memory_in(tmp_path).latest() == {client: position(client) for client in range(40)}


def test_what_was_shown_under_another_key_is_of_no_use(tmp_path):
    memory_in(tmp_path).keep({1: position(40), 2: position(7)})
    renewed = memory_in(tmp_path, KEYS | {1: digest("a new key")})
    assert renewed.latest() == {2: position(7)}
    renewed.keep({1: position(3, "new")})
    assert renewed.latest() == {1: position(3, "new"), 2: position(7)}
    assert memory_in(tmp_path).latest() == {1: position(40), 2: position(7)}
    without = {client: key for client, key in KEYS.items() if client != 2}
    assert memory_in(tmp_path, without).latest() == {1: position(40)}
