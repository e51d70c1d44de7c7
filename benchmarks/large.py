"""A large model: memory of server and client, bytes and seconds of a round, in one process or deployed over Flower.

`python -m benchmarks.large grid 20` has the server in this process and answers each request in a second one, as a node
would; `python -m benchmarks.large deployed 5` starts SuperLink and nodes. Memory is the most that a process has had.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast  # Flower's messages are played here

import numpy as np
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid

from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.layout import NamedArrays
from d2pfed.deploy.requests import RequestKind
from d2pfed.flower.grid import from_record, to_record
from d2pfed.flower.server import KeyUse, PrivateFedAvg

ROOT = Path(__file__).resolve().parent.parent
PARAMETERS = 25_000_000
_APP = ROOT / "benchmarks" / "deployment_app"
_SETTINGS = """[project]
name = "deployed"
version = "1.0.0"
description = "A federation with a large model."
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "d2pfed"
[tool.flwr.app.components]
serverapp = "deployed.large_server:app"
clientapp = "deployed.large_client:app"
[tool.flwr.app.config]
num-server-rounds = {rounds}
parameters = {parameters}
keys = "{keys}"
compression = "{compression}"
d2pfed-directory = "{directory}"
"""


def answer(directory: str, node: int, kind: RequestKind, request: str) -> tuple[str, float]:
    """Answer one request as a node would, from a file to a file; return it, and the most memory so far in MiB."""
    client = PrivateClient(read_client_config(Path(directory)), node, {}, _step)
    reply = Path(request).with_suffix(".reply")
    reply.write_bytes(client.answer(kind, Path(request).read_bytes()))
    return str(reply), most_memory("self")


def _step(arrays: NamedArrays, _config: object) -> NamedArrays:
    return {name: value + np.float32(1e-3) for name, value in arrays.items()}


@dataclass
class FileGrid:
    """A grid whose nodes share one other process; messages go through files, so that nobody holds them twice."""

    place: Path
    clients: dict[int, Path]  # directories by node
    pool: ProcessPoolExecutor
    memory: float = 0.0  # of the process that answers
    replies: dict[str, tuple[int, RequestKind, str]] = field(default_factory=dict)
    sent: int = 0
    received: int = 0

    def get_node_ids(self) -> list[int]:
        """Return the nodes."""
        return list(self.clients)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Have a request answered."""
        return [self._push(message.node, *from_record(message.content)) for message in messages]

    def _push(self, node: int, kind: RequestKind, data: bytes) -> str:
        file = self.place / f"{len(self.replies)}-{time.monotonic_ns()}"
        file.write_bytes(data)
        self.sent += len(data)
        reply, memory = self.pool.submit(answer, str(self.clients[node]), node, kind, str(file)).result()
        file.unlink()
        self.memory = max(self.memory, memory)
        self.replies[file.name] = node, kind, reply
        return file.name

    def pull_messages(self, wanted: Iterable[str]) -> Iterator[Any]:
        """Yield the answers that are there."""
        for name in [each for each in wanted if each in self.replies]:
            node, kind, reply = self.replies.pop(name)
            data = Path(reply).read_bytes()
            Path(reply).unlink()
            self.received += len(data)
            about = SimpleNamespace(reply_to_message_id=name, src_node_id=node)
            yield SimpleNamespace(metadata=about, has_error=lambda: False, content=to_record(kind, data))


def most_memory(process: str) -> float:
    """Return the most memory that a process has had, in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def in_one_process(clients: int, parameters: int, rounds: int, keys: str, compression: str) -> dict[str, object]:
    """Run the rounds with the server in this process."""
    with TemporaryDirectory(dir="/dev/shm") as directory, ProcessPoolExecutor(1) as pool:
        pool.submit(int).result()  # it starts while this process is small
        os.environ["XDG_RUNTIME_DIR"] = directory
        federation = _loopback().Federation(Path(directory) / "federation", clients)
        with federation as found:
            places = {100 + client: found.client_directory(client) for client in range(clients)}
            grid = FileGrid(Path(directory), places, pool)
            context = Context(
                run_id=1,
                node_id=1,
                node_config={},
                state=RecordDict(),
                run_config={"d2pfed-directory": str(found.server), "num-server-rounds": rounds},
            )
            model = {"params": np.zeros(parameters, np.float32)}
            target = {"epsilon": 1000.0, "compression": compression}
            strategy = PrivateFedAvg.for_target(target, model, context, keys=KeyUse(keys))
            object.__setattr__(strategy, "run_config", {})
            object.__setattr__(strategy, "message_factory", _message)
            initial = ArrayRecord({name: Array(value) for name, value in model.items()})
            begun = time.monotonic()
            strategy.start(cast("Grid", grid), initial)
            seconds = time.monotonic() - begun
            exchanges = _exchanges(found.server / "run")
        return {
            "seconds_per_round": seconds / rounds,
            "server_mib": most_memory("self"),
            "client_mib": grid.memory,
            "sent_mb_per_round": grid.sent / rounds / 1e6,
            "received_mb_per_round": grid.received / rounds / 1e6,
            "exchanges": exchanges,
        }


def _message(content: RecordDict, node: int, _group: str, _seconds: float) -> Any:  # noqa: ANN401
    return SimpleNamespace(content=content, node=node)


def deployed(clients: int, parameters: int, rounds: int, keys: str, compression: str) -> dict[str, object]:
    """Run the rounds over Flower and watch the memory of its processes."""
    with TemporaryDirectory() as directory, TemporaryDirectory(dir="/dev/shm") as memory:
        place, app = Path(directory) / "federation", Path(directory) / "app"
        shutil.copytree(_APP, app, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {"PYTHONPATH": str(ROOT / "src"), "XDG_RUNTIME_DIR": memory}
        federation = _loopback().Federation(place, clients, environment=environment, app=app, preload="")
        with federation as found:
            settings = {"rounds": rounds, "parameters": parameters, "keys": keys, "directory": found.server}
            settings |= {"compression": compression}
            (app / "pyproject.toml").write_text(_SETTINGS.format(**settings))
            found.start_superlink()
            for client in range(clients):
                found.register(client)
                found.start_supernode(client)
            begun, most = time.monotonic(), dict[str, float]()
            found.run(app, {})
            while "Finished task" not in found.log("superlink") and time.monotonic() < begun + 1500:
                for part, used in _resident(place):
                    most[part] = max(most.get(part, 0.0), used)
                time.sleep(0.5)
            runs = json.loads(found.flwr("list", "--format", "json"))["runs"]
            exchanges = _exchanges(found.server / "run")
        return {
            "memory_mib": most,
            "traffic": runs[0]["network-traffic"],
            "status": runs[0]["status"],
            "exchanges": exchanges,
        }


def _resident(place: Path) -> Iterator[tuple[str, float]]:
    """Yield what each process of a federation is, and the most memory that it has had."""
    mark = f"FLWR_HOME={place / 'flower'}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark not in file.read_bytes():
                continue
            command = (file.parent / "cmdline").read_bytes()
            if b"d2pfed.flower.node\0supernode" in command:
                part = "supernode"
            elif b"d2pfed.flower.node" in command:
                part = "client"
            elif b"serverapp" in command:
                part = "server"
            else:
                part = "superlink" if b"flower-superlink" in command else "other"
            yield part, most_memory(file.parent.name)


def _exchanges(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{"round_seconds": line["seconds"], "exchanges": line["exchanges"]} for line in lines]


def _loopback() -> Any:  # noqa: ANN401 - an example's
    sys.path.insert(0, str(ROOT / "examples" / "flower"))
    return import_module("loopback")


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=["grid", "deployed"])
    parser.add_argument("clients", type=int)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--keys", choices=["attempt", "standing"], default="standing")
    parser.add_argument("--compression", choices=["auto", "off"], default="off")
    chosen = parser.parse_args()
    measure = in_one_process if chosen.how == "grid" else deployed
    found = measure(chosen.clients, chosen.parameters, chosen.rounds, chosen.keys, chosen.compression)
    print(json.dumps({**vars(chosen), **found}))


if __name__ == "__main__":
    main()
