"""A file that must not outlive the machine's start: where it may lie, what is erased, and that erasing lasts."""

from pathlib import Path

import pytest

from d2pfed.errors import ConfigError
from d2pfed.ledger import files, keystore
from d2pfed.ledger.keystore import VolatileFile
from d2pfed.ledger.rows import Head

HERE = Head(0, bytes(32))


def test_a_directory_on_a_disk_is_refused_unless_the_settings_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(keystore, "is_in_memory", lambda place: False)
    with pytest.raises(ConfigError, match="keys_on_disk"):
        VolatileFile(tmp_path / "keys", "state")
    assert not (tmp_path / "keys").exists()
    VolatileFile(tmp_path / "keys", "state", keys_on_disk=True)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_memory_is_told_from_disk_by_the_kernels_table(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(
        "1 0 8:1 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:30 / {tmp_path}/with\\040space rw shared:1 - tmpfs tmpfs rw\n"
        f"3 2 0:31 / {tmp_path}/with\\040space/disk rw - ext4 /dev/a rw\n"
    )
    monkeypatch.setattr(keystore, "_MOUNTS_FILE", table)
    inside = tmp_path / "with space"
    assert [keystore.is_in_memory(place) for place in (inside, inside / "deep", inside / "disk", tmp_path)] == [
        True,
        True,
        False,
        False,
    ]
    monkeypatch.setattr(keystore, "_MOUNTS_FILE", tmp_path / "none")
    assert not keystore.is_in_memory(inside)


def test_a_directory_that_others_can_read_is_refused(tmp_path):
    place = tmp_path / "keys"
    place.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="owner alone"):
        VolatileFile(place, "state", keys_on_disk=True)


def test_a_system_that_does_not_tell_its_starts_apart_keeps_no_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(keystore, "_BOOT_FILE", Path("/nowhere"))
    file = VolatileFile(tmp_path / "keys", "state", keys_on_disk=True)
    with pytest.raises(ConfigError, match="starts apart"):
        file.write(b"secret", HERE)


def test_a_damaged_state_is_erased(tmp_path):
    file = VolatileFile(tmp_path / "keys", "state", keys_on_disk=True)
    file.write(b"secret", HERE)
    assert file.read(lambda head: True) == b"secret"
    (tmp_path / "keys" / "state").write_bytes(b"other")
    assert file.read(lambda head: True) is None
    assert "damaged" in file.refusal
    assert not (tmp_path / "keys" / "state").exists()


def in_memory(place: Path, name: str, content: bytes, position: Head = HERE) -> VolatileFile:
    file = VolatileFile(place, name, keys_on_disk=True)
    file.write(content, position)
    return file


def test_a_sweep_erases_what_is_over_or_does_not_fit_and_nothing_else(tmp_path, monkeypatch):
    for name, content in {"now": b"now", "past": b"over", "torn": b"now"}.items():
        file = in_memory(tmp_path / "keys", name, content)
    in_memory(tmp_path / "keys", "rolled back", b"now", Head(9, bytes(32)))
    (tmp_path / "keys" / "torn").write_bytes(b"half")
    synced = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    file.sweep(lambda head: head.seq < 9, lambda content: content == b"over")
    assert sorted(each.name for each in (tmp_path / "keys").iterdir()) == ["lock", "now"]
    assert synced == [tmp_path / "keys"]


@pytest.mark.parametrize("call", ["read", "write", "update", "sweep"])
def test_what_a_killed_writer_has_left_is_erased(tmp_path, monkeypatch, call):
    """A draft holds a key that the next write was to erase, and another process never writes over it."""
    file, place = in_memory(tmp_path / "keys", "state", b"first"), tmp_path / "keys"
    with monkeypatch.context() as killed:
        killed.setattr(files.os, "getpid", lambda: 1)
        killed.setattr(Path, "replace", _kill)
        with pytest.raises(KeyboardInterrupt):
            file.write(b"secret", HERE)
    assert {each.name for each in place.iterdir()} == {"lock", "state", ".state.1"}
    {
        "read": lambda: file.read(lambda head: True),
        "write": lambda: file.write(b"next", HERE),
        "update": lambda: file.update(lambda head: True, lambda content: (b"next", None), lambda: HERE),
        "sweep": lambda: file.sweep(lambda head: True, lambda content: False),
    }[call]()
    assert {each.name for each in place.iterdir()} == {"lock", "state"}


def _kill(*_given):
    raise KeyboardInterrupt


def test_erasing_lasts(tmp_path, monkeypatch):
    file, synced = in_memory(tmp_path / "keys", "state", b"secret"), []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    assert file.read(lambda head: False) is None
    assert synced == [tmp_path / "keys"]
    assert file.read(lambda head: True) is None
    with pytest.raises(ConfigError, match="standing keys are gone"):
        file.update(lambda head: True, lambda content: (content, None), lambda: HERE)
