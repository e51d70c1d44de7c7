"""Which software this is: one digest over the files of the installed package."""

from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path


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
