"""A coverage-guided fuzzer (atheris, the extra `fuzz`) against every reader and both protocols' machines.

`campaign_fuzz.py messages 20000000 DIRECTORY` runs so many messages in all and fails if anything but an error of ours
came out, or if one message took longer than twenty seconds. A finding is printed with its bytes; the rest goes on.
"""

import json
import mmap
import os
import sys
import traceback
from pathlib import Path

import atheris

SOURCE = Path(__file__).resolve().parent.parent / "src"
KERNELS = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in SOURCE.rglob("*.py")
    if "@compiled" in path.read_text()  # machine code cannot be instrumented
]
with atheris.instrument_imports(include=["d2pfed"], exclude=KERNELS):
    from support.fuzzing import GROUPS, HEADER_BYTES, Target, few, is_framed, reframed

# Of all messages: most to the quick ones. A machine takes fifty times as long, a certificate a hundred times.
PARTS = {"texts": 0.4, "wires": 0.5948, "machines": 0.005, "certificates": 0.0002}
few().start()  # for as long as the program runs
SECONDS = 20
LARGEST = 1 << 14


class Group:
    """One group of targets under the fuzzer: the first byte of an input chooses the target."""

    def __init__(self, name: str, directory: Path, counter: mmap.mmap) -> None:
        self.targets: list[Target] = list(GROUPS[name]())
        self.findings = directory / f"{name}.findings"
        self.counter, self.seen = counter, set[str]()
        self.corpus = directory / f"{name}.corpus"
        self.corpus.mkdir()
        for number, target in enumerate(self.targets):
            for place, sample in enumerate(target.samples):
                (self.corpus / f"{number}-{place}").write_bytes(bytes([number]) + sample)

    def one(self, data: bytes) -> None:
        """Give one message to its target, and note what comes out."""
        count = int.from_bytes(self.counter[:8], "little") + 1
        self.counter[:8] = count.to_bytes(8, "little")
        if not data:
            return
        target = self.targets[data[0] % len(self.targets)]
        try:
            refused = target.refuses(data[1:])
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {where.filename}:{where.lineno}"
            if place not in self.seen:
                self.seen.add(place)
                with self.findings.open("a") as out:
                    out.write(json.dumps({"target": target.name, "what": place, "data": data[1:].hex()}) + "\n")
            return
        if not refused:
            accepted = int.from_bytes(self.counter[8:16], "little") + 1
            self.counter[8:16] = accepted.to_bytes(8, "little")

    def mutate(self, data: bytes, most: int, seed: int) -> bytes:
        """Change a message; three of four times as a liar does, with a right checksum."""
        number = data[0] % len(self.targets) if data else seed % len(self.targets)
        body = data[1:] or self.targets[number].samples[0]
        original = self.targets[number].samples[0]
        if seed % 4 and is_framed(original):
            inner = body[HEADER_BYTES:] if len(body) > HEADER_BYTES else original[HEADER_BYTES:]
            return bytes([number]) + reframed(original, atheris.Mutate(inner, max(1, most - 80)))
        return bytes([number]) + atheris.Mutate(body, max(1, most - 1))


def fuzz(name: str, count: int, directory: Path, seed: int) -> dict[str, int]:
    """Fuzz a group in a process of its own, which the fuzzer ends; return how much was run and what was found."""
    counter = mmap.mmap(-1, 16)
    child = os.fork()
    if child == 0:
        group = Group(name, directory, counter)
        options = [f"-runs={count}", f"-seed={seed}", f"-max_len={LARGEST}", f"-timeout={SECONDS}", "-verbosity=0"]
        options += ["-rss_limit_mb=4096", f"-artifact_prefix={directory}/{name}-"]
        atheris.Setup(["fuzz", *options, str(group.corpus)], group.one, custom_mutator=group.mutate)
        atheris.Fuzz()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    findings = directory / f"{name}.findings"
    lines = findings.read_text().splitlines() if findings.exists() else []
    for line in lines:
        sys.stderr.write(line[:4000] + "\n")
    run, accepted = (int.from_bytes(counter[place : place + 8], "little") for place in (0, 8))
    return {"messages": run, "accepted": accepted, "findings": len(lines) + (status != 0)}


def main(name: str, size: int, directory: Path, seed: str) -> int:
    """Fuzz all groups, or the one that is named, and print what was found."""
    chosen = PARTS if name in ("messages", "all") else {name: 1.0}
    start = int.from_bytes(seed.encode()[-3:], "little") + 1
    found = {group: fuzz(group, max(1, round(part * size)), directory, start) for group, part in chosen.items()}
    counts = ", ".join(f"{each['messages']:,} to {group}" for group, each in found.items())
    total, failed = (sum(each[key] for each in found.values()) for key in ("messages", "findings"))
    accepted = sum(each["accepted"] for each in found.values())
    result = {
        "campaign": "fuzzing",
        "command": f"scripts/campaign fuzz-{name} {size} --seed {seed}",
        "result": f"{total:,} messages of a coverage-guided fuzzer ({counts}; {accepted:,} of them accepted): "
        f"{failed} uncaught exceptions or hangs",
        "failed": failed,
    }
    print(json.dumps(result))
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
