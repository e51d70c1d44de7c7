"""A power cut, played: what was not synced is gone."""

import os
import stat
from pathlib import Path


class Disk:
    """Watches what is synced below a folder; `cut` gives what a power cut at this moment would leave.

    A file has the content that it had at its last sync, a folder the names that it had at its own. The planted bugs
    are syncs that are left out, by their number.
    """

    def __init__(self, root: Path, monkeypatch, skipped: frozenset[int] = frozenset()) -> None:
        self.root, self.skipped, self.count = root, skipped, 0
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self.count += 1
        if self.count - 1 in self.skipped:
            return
        status = os.fstat(descriptor)
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISDIR(status.st_mode):
            self.folders[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(place)}
        else:
            self.files[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def cut(self, target: Path) -> Path:
        """Write what is left into another folder, and return it."""
        self._rebuild(self.root.stat().st_ino, target)
        return target

    def _rebuild(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, child in self.folders.get(inode, {}).items():
            if child in self.folders or (child not in self.files and (self.root / name).is_dir()):
                self._rebuild(child, target / name)
            else:
                (target / name).write_bytes(self.files.get(child, b""))
