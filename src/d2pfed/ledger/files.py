"""Files that belong to one user: never through a link, never another's, whole after any crash."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TextIO

from d2pfed.errors import ConfigError


class FileError(ConfigError):
    """One of this user's own files cannot be used; its text names it, so it is for this user alone."""


OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_MAY_USE = stat.S_IRWXG | stat.S_IRWXO


def require_directory(path: Path, *, forbidden: int = OTHERS_MAY_WRITE) -> None:
    """Refuse a directory that is a link, belongs to somebody else, or that others can write to (or use at all)."""
    try:
        found = path.lstat()
    except OSError as error:
        raise FileError(f"cannot use {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise FileError(f"{path} must be a directory, not a link to one")
    _require_own(path, found, forbidden)


def require_no_link(path: Path) -> None:
    """Refuse a link where a directory is written to: its maker has chosen another place."""
    if path.is_symlink():
        raise ConfigError(f"{path} must not be a link: files would be written elsewhere")


def make_directory(path: Path) -> None:
    """Make a directory for its owner alone, with its parents; one that exists is checked."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # something else is there: the check says what
    except OSError as error:
        raise FileError(_refusal(path, error)) from error
    require_directory(path)


def read_given(file: Path) -> bytes:
    """Return the content of a file that a user names and anyone may own; refuse a device, which may never end."""
    if file.is_char_device() or file.is_block_device():
        raise ConfigError(f"{file} must be a file, got a device")
    return file.read_bytes()


def read_file(file: Path, *, forbidden: int = OTHERS_MAY_WRITE) -> bytes | None:
    """Return the content of one's own file, or None if there is none; refuses links and forbidden rights of others."""
    try:
        with (
            _opened(file, os.O_RDONLY | os.O_NONBLOCK, forbidden) as descriptor,
            os.fdopen(descriptor, "rb", closefd=False) as opened,
        ):
            return opened.read()
    except FileNotFoundError:
        return None


def replace_file(file: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file, by default for its owner alone, on the disk when this returns.

    Guarantee: a crash leaves the old one or the new one, never a part. `mode` is subject to the umask.
    Checked: test_power_loss.py::test_a_replaced_file_survives_a_power_cut_old_or_new.
    """
    _write_draft(file, content, mode).replace(file)
    sync_directory(file.parent)


def create_file(file: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file that did not exist, whole or not at all, on the disk when this returns.

    FileExistsError if there was anything of that name, link or not.
    """
    draft = _write_draft(file, content, mode)
    try:
        os.link(draft, file, follow_symlinks=False)  # unlike a rename, it never takes another's place
    finally:
        draft.unlink()
    sync_directory(file.parent)


def remove_drafts(directory: Path) -> None:
    """Erase what writers that were killed have left in a directory; the caller holds its lock."""
    for draft in directory.glob(".*.*"):
        if draft.name.rpartition(".")[2].isdecimal():  # of the process that wrote it
            draft.unlink(missing_ok=True)


def append_file(file: Path, content: bytes) -> None:
    """Add to the end of one's own file, on the disk when this returns."""
    with _opened(file, os.O_WRONLY | os.O_APPEND) as descriptor:
        _write(descriptor, content)


def opened_for_lines(file: Path) -> TextIO:
    """Open a file to add lines to it, made if there is none; never through a link."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return os.fdopen(descriptor, "a", encoding="utf-8")


def truncate_file(file: Path, size: int) -> None:
    """Cut one's own file, on the disk when this returns."""
    with _opened(file, os.O_WRONLY) as descriptor:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)


def keep_newest(directory: Path, most: int) -> None:
    """Erase all but the newest files of a directory, by their last change; the caller holds its lock."""
    files = [file for file in directory.iterdir() if file.name != "lock" and file.is_file()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-most]:
        file.unlink()


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock that a file stands for, until the block ends or the process does."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise FileError(_refusal(file, error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _opened(file: Path, flags: int, forbidden: int = OTHERS_MAY_WRITE) -> Iterator[int]:
    """Open one's own plain file, never through a link; FileNotFoundError if there is none."""
    try:
        descriptor = os.open(file, flags | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise FileError(_refusal(file, error)) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"{file} must be a plain file")
        _require_own(file, found, forbidden)
        yield descriptor
    finally:
        os.close(descriptor)


def _write_draft(file: Path, content: bytes, mode: int) -> Path:
    if file.name in ("", ".."):
        raise FileError(f"a file must have a name, got {str(file)!r}")
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, mode)
    try:
        _write(descriptor, content)
    finally:
        os.close(descriptor)
    return draft


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _refusal(file: Path, error: OSError) -> str:
    return f"{file} must not be a link" if error.errno == errno.ELOOP else f"cannot use {file}: {error.strerror}"


def _require_own(path: Path, found: os.stat_result, forbidden: int) -> None:
    if found.st_uid != os.geteuid():
        raise FileError(f"{path} must belong to the user who runs this, it belongs to user {found.st_uid}")
    if found.st_mode & forbidden:
        rule = "readable by its owner alone" if forbidden & stat.S_IRGRP else "writable by its owner alone"
        raise FileError(f"{path} must be {rule}: chmod go-rwx {path}")


@cache
def software_digest() -> str:
    """Return the digest of the package as it was when this process first asked: what a run is charged with."""
    return files_digest(Path(str(files("d2pfed"))))


def files_digest(root: Path) -> str:
    """Return the hash of all files below a directory: their names and contents, in the order of the names."""
    whole = sha256()
    for file in sorted(root.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            content = sha256(file.read_bytes()).hexdigest()
            whole.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return whole.hexdigest()
