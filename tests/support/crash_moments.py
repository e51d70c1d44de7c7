"""A disk that forgets: what a power cut leaves at each system call, if only what was synced has survived."""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Moment:
    """The files of one moment as another process sees them (a kill), and as the disk holds them (a power cut)."""

    call: str
    sent: int
    after_kill: dict[str, bytes]
    after_power_cut: dict[str, bytes]


class Disk:
    """Watches system calls: bytes survive when their file was synced, names when their directory was."""

    def __init__(self, root: Path, monkeypatch, sent: Callable[[], int]) -> None:
        self._root = root
        self._sent = sent
        self._bytes: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        self.moments: list[Moment] = []
        for folder, _, files in os.walk(root):
            self._names[folder] = {name: (Path(folder) / name).stat().st_ino for name in files}
            self._bytes |= {
                (Path(folder) / name).stat().st_ino: (Path(folder) / name).read_bytes() for name in files
            }
        for name in ("write", "fsync", "replace", "rename", "unlink", "ftruncate"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))
        monkeypatch.setattr(os, "open", self._opening(os.open))

    def _watched(self, name: str, call: Callable) -> Callable:
        def watched(*arguments, **options):
            self._note(f"before {name}")
            result = call(*arguments, **options)
            if name == "fsync":
                self._synced(arguments[0])
            self._note(f"after {name}")
            return result

        return watched

    def _opening(self, call: Callable) -> Callable:
        def opening(file, flags, *arguments, **options):
            descriptor = call(file, flags, *arguments, **options)
            if flags & os.O_EXCL:
                self._bytes.pop(os.fstat(descriptor).st_ino, None)  # a number of an erased file, used again
            return descriptor

        return opening

    def _synced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(found.st_mode):
            self._names[str(path)] = {item.name: item.stat().st_ino for item in path.iterdir() if item.is_file()}
        else:
            self._bytes[found.st_ino] = path.read_bytes()

    def _note(self, call: str) -> None:
        files = [path for path in self._root.rglob("*") if path.is_file()]
        now = {str(path.relative_to(self._root)): path.read_bytes() for path in files}
        kept = {
            str((Path(folder) / name).relative_to(self._root)): self._bytes.get(number, b"")
            for folder, names in self._names.items()
            for name, number in names.items()
        }
        self.moments.append(Moment(call, self._sent(), now, kept))


def lay_out(root: Path, files: dict[str, bytes]) -> Path:
    """Put files under a directory, as they were found after a crash."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o600)
    for folder in {(root / name).parent for name in files}:
        folder.chmod(0o700)
    return root
