"""Data files: where they are found, what they must contain, where they come from, and their official formats."""

import gzip
import hashlib
import io
import math
import os
import re
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2pfed.errors import ConfigError, DownloadError
from d2pfed.numerics.ring import IntVector

_TIMEOUT_SECONDS = 60
_IDX_TYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.uint8), 12: np.dtype(">i4")}
_CIFAR_RECORD = 1 + 3 * 32 * 32
_SPEECH = re.compile(r"(?:\A|(?<=\n\n))([^\n:]+):\n(.+?)(?=\n\n|\n?\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its place under a data directory, the SHA-256 of its plain content, and its address.

    The file may be stored as it is or with `.gz` added. Where the address ends in `.tar.gz`, the file is the
    archive's member of the same name.
    """

    path: str
    sha256: str
    url: str

    def find(self, directory: Path) -> Path | None:
        """Return where this file is under a directory, if it is there."""
        candidates = (directory / self.path, directory / f"{self.path}.gz")
        return next((path for path in candidates if path.is_file()), None)


_MNIST_URL = "https://storage.googleapis.com/cvdf-datasets/mnist"
_QMNIST_URL = "https://raw.githubusercontent.com/facebookresearch/qmnist/master"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"

_MNIST = tuple(
    Source(f"mnist/{name}", sha256, f"{_MNIST_URL}/{name}.gz")
    for name, sha256 in (
        ("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)
MNIST_TRAIN_IMAGES, MNIST_TRAIN_LABELS, MNIST_TEST_IMAGES, MNIST_TEST_LABELS = _MNIST
WRITERS = Source(
    "qmnist/qmnist-train-labels-idx2-int",
    "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
    f"{_QMNIST_URL}/qmnist-train-labels-idx2-int.gz",
)
_CIFAR = tuple(
    Source(f"cifar-10-batches-bin/{name}.bin", sha256, _CIFAR_URL)
    for name, sha256 in (
        ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    )
)
CIFAR_TRAIN, CIFAR_TEST = _CIFAR[:5], _CIFAR[5]
SHAKESPEARE = Source(
    "shakespeare/tinyshakespeare.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
)
SOURCES: Mapping[str, tuple[Source, ...]] = {
    "infimnist": _MNIST,
    "digits": (),
    "mnist-writers": (*_MNIST, WRITERS),
    "cifar10": _CIFAR,
    "shakespeare": (SHAKESPEARE,),
}


def search_path(data_dir: Path | None) -> tuple[Path, ...]:
    """Return where data is looked for: the given directory, $D2PFED_DATA, the user's cache; the first has it."""
    given = [data_dir, Path(os.environ["D2PFED_DATA"]) if os.environ.get("D2PFED_DATA") else None]
    return *(path for path in given if path is not None), cache_directory()


def cache_directory() -> Path:
    """Return the user's cache directory for data, whether it exists or not."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "d2pfed"


def files_of(name: str) -> tuple[Source, ...]:
    """Return the files that a task needs."""
    if name not in SOURCES:
        raise ConfigError(f"task must be one of {', '.join(SOURCES)}, got {name!r}")
    return SOURCES[name]


def where(name: str, data_dir: Path | None = None) -> dict[str, Path | None]:
    """Say for each file of a task where it is, or None; an empty answer means that nothing is needed."""
    places = search_path(data_dir)
    hits = {source.path: [source.find(place) for place in places] for source in files_of(name)}
    return {path: next((hit for hit in found if hit), None) for path, found in hits.items()}


def locate(name: str, data_dir: Path | None = None) -> dict[str, Path]:
    """Return where each file of a task is; missing ones are an error that says what to do."""
    found = where(name, data_dir)
    if missing := [path for path, place in found.items() if place is None]:
        looked = ", ".join(map(str, search_path(data_dir)))
        raise ConfigError(
            f"task {name} needs {', '.join(missing)} (plain or .gz), not found in {looked}: "
            f"set D2PFED_DATA, or run `d2pfed data fetch {name}`"
        )
    return {path: place for path, place in found.items() if place is not None}


def read(source: Source, places: Mapping[str, Path]) -> bytes:
    """Return the plain content of a located file, after checking its checksum."""
    path = places[source.path]
    content = path.read_bytes()
    return _checked(source, gzip.decompress(content) if path.suffix == ".gz" else content, str(path))


def fetch(name: str, directory: Path) -> list[Path]:
    """Download what a task lacks into a directory, and return the new files; each is checked before it appears."""
    return download([source for source in files_of(name) if source.find(directory) is None], directory)


def download(missing: list[Source], directory: Path) -> list[Path]:
    """Download files into a directory, each address once."""
    answers: dict[str, bytes] = {}
    fresh: list[Path] = []
    for source in missing:
        url = source.url
        if url not in answers:
            try:
                with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - a constant
                    answers[url] = answer.read()
            except OSError as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection open
                raise DownloadError(f"cannot fetch {url}: {error}") from error
        try:
            if url.endswith(".tar.gz"):
                with tarfile.open(fileobj=io.BytesIO(answers[url]), mode="r:gz") as archive:
                    member = archive.extractfile(source.path)
                    content = member.read() if member else b""
            else:
                content = gzip.decompress(answers[url]) if url.endswith(".gz") else answers[url]
        except (OSError, EOFError, KeyError, tarfile.TarError) as error:
            raise ConfigError(f"{url} does not hold {source.path}: {error}") from error
        path, content = directory / source.path, _checked(source, content, url)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            partial.write(content)
        fresh.append(Path(partial.name).replace(path))
    return fresh


def _checked(source: Source, content: bytes, origin: str) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    if found != source.sha256:
        raise ConfigError(f"SHA-256 of {source.path} must be {source.sha256}, {origin} has {found}")
    return content


def read_idx(content: bytes) -> NDArray[np.integer[Any]]:
    """Read an IDX file of bytes or 32-bit integers (MNIST, QMNIST)."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or not content[3]:
        raise ConfigError(f"an IDX file must start with 0, 0, type 8 or 12, and its axes, got {content[:4]!r}")
    kind, axes = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * axes
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) != start + kind.itemsize * math.prod(shape):
        raise ConfigError(f"an IDX file of shape {shape} must not have {len(content)} bytes")
    values: NDArray[np.integer[Any]] = np.frombuffer(content, kind, offset=start).reshape(shape)
    return values.astype(kind.newbyteorder("="))


def read_cifar(content: bytes) -> tuple[NDArray[np.uint8], IntVector]:
    """Read a binary CIFAR-10 batch: images (count, 3, 32, 32) and labels."""
    if not content or len(content) % _CIFAR_RECORD:
        raise ConfigError(f"a CIFAR-10 batch must have a multiple of {_CIFAR_RECORD} bytes, got {len(content)}")
    records = np.frombuffer(content, np.uint8).reshape(-1, _CIFAR_RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32).copy(), records[:, 0].astype(np.int64)


def read_speeches(text: str) -> dict[str, str]:
    """Return what each speaker of a play says, speech after speech: each has a name and a colon in its first line."""
    said: dict[str, list[str]] = {}
    for name, speech in _SPEECH.findall(text):
        said.setdefault(name, []).append(speech)
    return {name: "\n".join(speeches) for name, speeches in sorted(said.items())}
