"""Files are found, checked, fetched and read; tasks are what their descriptions say."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2pfed.errors import ConfigError, DownloadError
from d2pfed.learning import (
    Examples,
    Partition,
    PartitionKind,
    StoredClients,
    Task,
    cache_directory,
    fetch,
    load_task,
    sources,
    where,
)
from d2pfed.learning.sources import read_cifar, read_idx, read_speeches

torch.set_num_threads(1)  # the tensors are tiny: a second thread only waits

OFFICIAL = os.environ.get("D2PFED_DATA")


@pytest.fixture(autouse=True)
def empty_places(tmp_path, monkeypatch):
    monkeypatch.delenv("D2PFED_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx(values: np.ndarray) -> bytes:
    kind = 8 if values.dtype == np.uint8 else 12
    head = bytes([0, 0, kind, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(0, 4), min_size=1, max_size=3), kind=st.sampled_from([np.uint8, np.int32]))
def test_reading_undoes_writing_idx(shape, kind):
    values = np.random.default_rng(1).integers(0, 200, shape).astype(kind)
    np.testing.assert_array_equal(read_idx(idx(values)), values)


def test_idx_files_that_are_cut_short_or_too_long_are_refused():
    whole = idx(np.zeros((3, 4), np.uint8))
    for damaged in (*(whole[:end] for end in range(len(whole))), whole + b"\0"):
        with pytest.raises(ConfigError, match="IDX"):
            read_idx(damaged)


def test_idx_of_floats_is_refused():
    with pytest.raises(ConfigError, match="type 8 or 12"):
        read_idx(b"\0\0\x0d\1\0\0\0\0")


def test_cifar_records_are_a_label_and_three_planes():
    images = np.random.default_rng(1).integers(0, 256, (2, 3, 32, 32), dtype=np.uint8)
    records = b"".join(bytes([label]) + image.tobytes() for label, image in zip((3, 9), images, strict=True))
    read, labels = read_cifar(records)
    np.testing.assert_array_equal(read, images)
    assert labels.tolist() == [3, 9]
    for damaged in (b"", records[:-1], records + b"\0"):
        with pytest.raises(ConfigError, match="multiple of 3073"):
            read_cifar(damaged)


def test_speeches_are_gathered_by_speaker():
    play = "B C:\nOne,\nstill: one.\n\nA:\nTwo.\n\nB C:\nThree.\n"
    assert read_speeches(play) == {"A": "Two.", "B C": "One,\nstill: one.\nThree."}


def source(content: bytes, path: str = "set/file", url: str = "http://127.0.0.1:9/none") -> sources.Source:
    return sources.Source(path, hashlib.sha256(content).hexdigest(), url)


def test_files_are_read_plain_or_packed_and_checked(tmp_path):
    wanted = source(b"hello")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/file.gz").write_bytes(gzip.compress(b"hello"))
    assert sources.read(wanted, {"set/file": wanted.find(tmp_path)}) == b"hello"
    (tmp_path / "set/file").write_bytes(b"hellO")
    with pytest.raises(ConfigError, match="SHA-256 of set/file must be"):
        sources.read(wanted, {"set/file": wanted.find(tmp_path)})


def test_data_is_looked_for_in_directory_environment_cache(tmp_path, monkeypatch):
    first, second, third = tmp_path / "given", tmp_path / "env", cache_directory()
    monkeypatch.setenv("D2PFED_DATA", str(second))
    assert sources.search_path(first) == (first, second, third)
    name = sources.SHAKESPEARE.path
    for place in (third, second, first):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(b"")
        assert where("shakespeare", first)[name] == place / name


def test_the_cache_is_in_the_home_directory_where_nothing_else_is_said(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "d2pfed"


@pytest.mark.parametrize("name", ["mnist-writers", "cifar10", "shakespeare"])
def test_missing_files_are_named_with_the_places_and_the_command(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_task(name, data_dir=tmp_path / "nothing")
    text = str(caught.value)
    assert all(file in text for file in where(name))
    assert str(tmp_path / "nothing") in text
    assert str(cache_directory()) in text
    assert f"d2pfed data fetch {name}" in text


def test_a_given_directory_without_mnist_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="infimnist needs mnist/train-images"):
        load_task("infimnist", data_dir=tmp_path)


@pytest.fixture
def site(tmp_path):
    """A real web server over a directory."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_arguments):
            pass

    root = tmp_path / "site"
    root.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_downloads_are_unpacked_and_checked(site, tmp_path):
    root, url = site
    (root / "plain").write_bytes(b"one")
    (root / "packed.gz").write_bytes(gzip.compress(b"two"))
    with tarfile.open(root / "many.tar.gz", "w:gz") as archive:
        for content in (b"three", b"four"):
            member = tarfile.TarInfo(f"d/{content.decode()}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    wanted = [
        source(b"one", "a/one", f"{url}/plain"),
        source(b"two", "a/two", f"{url}/packed.gz"),
        source(b"three", "d/three", f"{url}/many.tar.gz"),
        source(b"four", "d/four", f"{url}/many.tar.gz"),
    ]
    fresh = sources.download(wanted, tmp_path / "data")
    assert [path.read_bytes() for path in fresh] == [b"one", b"two", b"three", b"four"]
    assert [item.find(tmp_path / "data") for item in wanted] == fresh
    assert len(list((tmp_path / "data").rglob("*.*"))) == 0


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("plain", "SHA-256"),
        ("absent", "cannot fetch"),
        ("broken.gz", "does not hold"),
        ("broken.tar.gz", "does not hold"),
        ("other.tar.gz", "does not hold"),
        ("folder.tar.gz", "SHA-256"),
    ],
)
def test_a_failed_download_is_one_line_and_leaves_nothing(site, tmp_path, address, reason):
    root, url = site
    for name in ("plain", "broken.gz", "broken.tar.gz"):
        (root / name).write_bytes(b"something else")
    tarfile.open(root / "other.tar.gz", "w:gz").close()
    with tarfile.open(root / "folder.tar.gz", "w:gz") as archive:
        folder = tarfile.TarInfo("set/file")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    with pytest.raises((ConfigError, DownloadError), match=reason) as caught:
        sources.download([source(b"wanted", url=f"{url}/{address}")], tmp_path / "data")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_place_that_cannot_be_reached_is_one_line_too(tmp_path):
    with pytest.raises(DownloadError, match=r"cannot fetch http://127\.0\.0\.1:9/none: "):
        sources.download([source(b"wanted")], tmp_path)


def test_nothing_is_fetched_for_a_task_that_brings_its_data(tmp_path):
    assert fetch("digits", tmp_path) == []
    assert where("digits") == {}
    with pytest.raises(ConfigError, match="task must be one of"):
        fetch("imagenet", tmp_path)


def test_addresses_are_secure_and_checksums_whole():
    for files in sources.SOURCES.values():
        for file in files:
            assert file.url.startswith("https://")
            assert len(bytes.fromhex(file.sha256)) == 32


def disjoint(*parts: Examples) -> bool:
    rows = torch.cat([part.inputs.flatten(1) for part in parts]).numpy()
    return len({row.tobytes() for row in rows}) == len(rows)


def test_the_small_digits_are_split_without_overlap():
    task = load_task("digits", population=10)
    held = [task.clients.examples(client) for client in range(10)]
    assert sum(map(len, held)) == 1257
    assert disjoint(*held, task.validation, task.test())
    assert not disjoint(held[0], held[0])
    assert task.clients.examples(0).inputs.abs().max() <= 1


def test_what_is_held_out_does_not_depend_on_the_seed():
    first, second = (load_task("digits", seed=seed) for seed in (1, 2))
    assert torch.equal(first.validation.inputs, second.validation.inputs)
    assert torch.equal(first.test().labels, second.test().labels)
    assert not torch.equal(first.clients.examples(0).inputs, second.clients.examples(0).inputs)


def test_embedded_digits_serve_a_hundred_thousand_clients():
    task = load_task("infimnist")
    assert task.clients.population == 100_000
    assert len(task.clients.examples(99_999)) == 80
    assert (len(task.validation), len(task.test())) == (500, 1000)
    base = torch.from_numpy(task.clients.base)[:, None].float().mul(1 / 255)
    assert disjoint(Examples(base, torch.from_numpy(task.clients.labels)), task.validation, task.test())


def test_class_shards_of_the_small_digits_hold_few_classes():
    task = load_task("digits", population=50, partition=Partition(PartitionKind.SHARDS))
    assert max(len(task.clients.examples(client).labels.unique()) for client in range(50)) <= 2


@pytest.mark.parametrize(
    ("name", "wrong", "reason"),
    [
        ("imagenet", {}, "task must be one of"),
        ("digits", {"population": 0}, "population must be at least 1"),
        ("digits", {"population": 2000}, "population must be in"),
        ("digits", {"partition": Partition(PartitionKind.OWNER)}, "known owners"),
        ("infimnist", {"partition": Partition(PartitionKind.OWNER)}, "no owner"),
    ],
)
def test_impossible_tasks_are_refused(name, wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        load_task(name, **wrong)


def write(place: Path, file: sources.Source, content: bytes) -> sources.Source:
    """Put our own content in the place of an official file, with a source that expects it."""
    (place / file.path).parent.mkdir(parents=True, exist_ok=True)
    (place / file.path).write_bytes(content)
    return sources.Source(file.path, hashlib.sha256(content).hexdigest(), file.url)


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """Files in MNIST's form with 5,400 training and 30 test digits of noise, three writers of 1,800 each."""
    generator = np.random.default_rng(1)
    writers = np.zeros((5400, 8), np.int32)
    writers[:, 2] = 7 * (np.arange(5400) % 3)
    contents = {
        "MNIST_TRAIN_IMAGES": idx(generator.integers(0, 256, (5400, 28, 28), dtype=np.uint8)),
        "MNIST_TRAIN_LABELS": idx(np.arange(5400).astype(np.uint8) % 10),
        "MNIST_TEST_IMAGES": idx(generator.integers(0, 256, (30, 28, 28), dtype=np.uint8)),
        "MNIST_TEST_LABELS": idx(np.arange(30).astype(np.uint8) % 10),
        "WRITERS": idx(writers),
    }
    for name, content in contents.items():
        monkeypatch.setattr(sources, name, write(tmp_path, getattr(sources, name), content))
    return tmp_path


def test_mnist_in_a_directory_becomes_the_base_digits(small_mnist, monkeypatch):
    given = load_task("infimnist", data_dir=small_mnist, population=5)
    monkeypatch.setenv("D2PFED_DATA", str(small_mnist))
    found = load_task("infimnist", population=5, partition=Partition(PartitionKind.DIRICHLET, 0.5))
    assert "MNIST training digits" in given.description
    assert given.description == found.description
    assert len(given.clients.labels) == 400
    assert (len(given.validation), len(given.test())) == (5000, 30)


def test_writers_are_the_clients_of_mnist_writers(small_mnist):
    task = load_task("mnist-writers", data_dir=small_mnist)
    held = [task.clients.examples(client) for client in range(task.clients.population)]
    assert len(held) == 3
    assert sum(map(len, held)) == 400
    assert disjoint(*held, task.validation, task.test())
    mixed = load_task("mnist-writers", data_dir=small_mnist, population=7, partition=Partition(PartitionKind.IID))
    assert mixed.clients.population == 7
    with pytest.raises(ConfigError, match="must be 3, one for each, got 7"):
        load_task("mnist-writers", data_dir=small_mnist, population=7)


def test_test_files_are_not_opened_before_the_final_number(small_mnist):
    (small_mnist / sources.MNIST_TEST_IMAGES.path).write_bytes(b"damaged")
    task = load_task("infimnist", data_dir=small_mnist)
    with pytest.raises(ConfigError, match="SHA-256"):
        task.test()


def test_images_are_cropped_to_their_centre(tmp_path, monkeypatch):
    generator = np.random.default_rng(1)
    official = (*sources.CIFAR_TRAIN, sources.CIFAR_TEST)
    images = generator.integers(0, 256, (6, 1100, 3, 32, 32), dtype=np.uint8)
    records = np.concatenate([np.ones((6, 1100, 1), np.uint8), images.reshape(6, 1100, -1)], axis=2)
    files = [write(tmp_path, file, batch.tobytes()) for file, batch in zip(official, records, strict=True)]
    monkeypatch.setattr(sources, "CIFAR_TRAIN", tuple(files[:5]))
    monkeypatch.setattr(sources, "CIFAR_TEST", files[5])
    task = load_task("cifar10", data_dir=tmp_path, population=20)
    assert sum(len(task.clients.examples(client)) for client in range(20)) == 500
    assert (len(task.validation), len(task.test())) == (5000, 1100)
    wanted = torch.from_numpy(images[5, :, :, 4:28, 4:28]).float() / 127.5 - 1
    torch.testing.assert_close(task.test().inputs, wanted)
    assert task.clients.examples(0).inputs.dtype == torch.float32


def test_speakers_are_the_clients_of_shakespeare(tmp_path, monkeypatch):
    words = "the quick brown fox jumps over the lazy dog and then some more of it "
    play = "\n\n".join(f"{name}:\n{words * times}" for name, times in (("A", 3), ("B", 30), ("MUTE", 0), ("C", 9)))
    text = play.replace("MUTE:\n", "MUTE:\nNo.")
    monkeypatch.setattr(sources, "SHAKESPEARE", write(tmp_path, sources.SHAKESPEARE, text.encode()))
    task = load_task("shakespeare", data_dir=tmp_path)
    sizes = [len(task.clients.examples(client)) for client in range(task.clients.population)]
    assert np.argsort(sizes).tolist() == [0, 2, 1]
    alphabet = sorted(set(text))
    first = task.clients.examples(0)
    assert "".join(alphabet[code] for code in first.inputs[0].tolist()) == words[:32]
    assert alphabet[int(first.labels[0])] == words[32]
    assert task.classes == len(alphabet)
    assert sum(sizes) == pytest.approx(8 * len(task.test()), rel=0.05)
    assert len(task.validation) == pytest.approx(len(task.test()), abs=3)


def examples(count: int = 3) -> Examples:
    return Examples(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64))


@pytest.mark.parametrize(
    ("inputs", "labels"),
    [
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(())),
    ],
)
def test_examples_that_do_not_match_are_refused(inputs, labels):
    with pytest.raises(ConfigError):
        Examples(inputs, labels)


def test_clients_hold_rows_of_their_table():
    assert len(StoredClients(examples(), (np.arange(2), np.arange(0))).examples(1)) == 0
    for rows in ((), (np.array([3]),)):
        with pytest.raises(ConfigError):
            StoredClients(examples(), rows)
    for client in (-1, 1):
        with pytest.raises(ConfigError, match="client must be in"):
            StoredClients(examples(), (np.arange(3),)).examples(client)


@pytest.mark.parametrize(
    "wrong",
    [{"classes": 1}, {"input_shape": (3,)}, {"validation": Examples(torch.zeros(3, 2), torch.zeros(3))}],
)
def test_tasks_that_do_not_fit_together_are_refused(wrong):
    fitting = {
        "name": "t",
        "clients": StoredClients(examples(), (np.arange(3),)),
        "validation": examples(),
        "test": examples,
        "classes": 2,
        "input_shape": (2,),
        "description": "Zeros.",
    }
    Task(**fitting)
    with pytest.raises(ConfigError):
        Task(**(fitting | wrong))


@pytest.mark.skipif(OFFICIAL is None, reason="the official files are not in $D2PFED_DATA")
@pytest.mark.parametrize(
    ("name", "population", "tested"),
    [("infimnist", 100_000, 10_000), ("mnist-writers", 539, 10_000), ("cifar10", 2_000, 10_000)],
)
def test_official_files_are_read(name, population, tested):
    task = load_task(name, data_dir=Path(OFFICIAL))
    assert task.clients.population == population
    assert len(task.test()) == tested
