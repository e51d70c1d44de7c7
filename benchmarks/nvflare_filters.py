"""What NVFlare's privacy filters and a private run keep of the accuracy, and what the server learns of one record.

In an environment that has NVFlare: python -m benchmarks.nvflare_filters DIRECTORY --out FILE, with MNIST's IDX files

Twenty sites train a softmax regression with ten passes over their data. The filters are NVFlare's own, on each site's
update: with their defaults, and sharing only the largest tenth of it. The attack: one record of random pixels is in the
first site's data, or is not; the server projects what it sees in each round onto that record's gradient. The area under
the curve says how well the sum of these projections tells the two cases apart (0.5: not at all, 1: always).
"""

import argparse
import gzip
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray

import d2pfed
from benchmarks.record import surroundings, write
from d2pfed.accounting import Unit

SITES = 20
PASSES = 10
RECORDS = 12_000  # of all sites
BATCH = 32
BATCH_RATE = 0.1  # of a private round, of which a pass has 1 / BATCH_RATE
LR = 0.1
CLASSES, PIXELS = 10, 784

Floats = NDArray[np.float32]
Data = tuple[Floats, NDArray[np.int64]]
Filter = Callable[[Floats, int], Floats]  # from an update and its number of steps to what the server sees
Watch = Callable[[Floats, Floats], None]  # called with a model and what the server sees of the first site


@dataclass(frozen=True, slots=True)
class Row:
    """A way to train: its accuracy, what the server sees of an update, and how well it finds one record."""

    what: str
    epsilon: float | None  # that is stated for the whole run: of a site by SVTPrivacy, of a record by a plan
    accuracy: float
    exact: float | None  # of a site's numbers, the share that the server sees exactly as trained
    area: float  # under the curve of the attack
    runs: int


def gradient(weights: Floats, inputs: Floats, labels: NDArray[np.int64]) -> Floats:
    """Return the mean gradient of the cross entropy; a row of weights for each class, the last column the bias."""
    scores = inputs @ weights[:, :-1].T + weights[:, -1]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    found: Floats = np.c_[chances.T @ inputs, chances.sum(0)].astype(np.float32) / np.float32(len(labels))
    return found


def local_update(weights: Floats, data: Data, generator: torch.Generator) -> tuple[Floats, int]:
    """Return what one pass over a site's data changes, and in how many steps."""
    own, order = weights.copy(), torch.randperm(len(data[1]), generator=generator).numpy()
    batches = np.array_split(order, max(1, len(order) // BATCH))
    for batch in batches:
        own -= LR * gradient(own, data[0][batch], data[1][batch])
    return own - weights, len(batches)


def averaged(applied: Filter, sites: list[Data], watch: Watch, seed: int) -> Floats:
    """Train by federated averaging of updates that went through a filter."""
    generator, weights = torch.Generator().manual_seed(seed), np.zeros((CLASSES, PIXELS + 1), np.float32)
    for _ in range(PASSES):
        seen = [applied(*local_update(weights, data, generator)) for data in sites]
        watch(weights, seen[0])
        weights = weights + np.mean(seen, axis=0)
    return weights


def filters() -> Mapping[str, tuple[Filter, Callable[[], float]]]:
    """Return NVFlare's own filters, and what SVT has spent by its own account."""
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable  # noqa: PLC0415 - only here is it needed
    from nvflare.apis.fl_context import FLContext  # noqa: PLC0415
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy  # noqa: PLC0415
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy  # noqa: PLC0415

    def apply(made: PercentilePrivacy | SVTPrivacy, update: Floats, steps: int) -> Floats:
        dxo = DXO(DataKind.WEIGHT_DIFF, {"w": update.copy()}, {MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
        result = made.process(dxo.to_shareable(), FLContext())
        found: Floats = from_shareable(result).data["w"].astype(np.float32)
        return found

    svt = SVTPrivacy()
    return {
        "FedAvg": (lambda update, _steps: update, float),
        "PercentilePrivacy()": (partial(apply, PercentilePrivacy()), float),
        "PercentilePrivacy(90)": (partial(apply, PercentilePrivacy(90)), float),
        "SVTPrivacy()": (partial(apply, svt), svt.get_privacy_spent),
    }


def private(epsilon: float, sites: list[Data], watch: Watch, _seed: int) -> Floats:
    """Train with each record protected; the server sees a model after each round, whose steps are noisy means."""
    module = torch.nn.Linear(PIXELS, CLASSES)
    torch.nn.init.zeros_(module.weight)
    torch.nn.init.zeros_(module.bias)
    before = np.zeros((CLASSES, PIXELS + 1), np.float32)

    def look(_record: object, model: Callable[[], torch.nn.Module]) -> None:
        nonlocal before
        now = to_weights(model())
        watch(before, now - before)
        before = now

    target = d2pfed.PrivacyTarget(
        unit=Unit.RECORD, epsilon=epsilon, clip=1.0, records=RECORDS, batch_rate=BATCH_RATE, dropouts=0.0,
        colluders=0.1, against=d2pfed.SERVER,
    )  # fmt: skip
    with TemporaryDirectory() as directory:
        silos = [(torch.from_numpy(inputs), torch.from_numpy(labels)) for inputs, labels in sites]
        result = d2pfed.fit(
            module, silos, privacy=target, rounds=round(PASSES / BATCH_RATE), lr=2.0, directory=f"{directory}/run",
            run={"callbacks": look, "progress": False},
        )  # fmt: skip
    trained: torch.nn.Module = result.module
    return to_weights(trained)


def to_weights(module: torch.nn.Module) -> Floats:
    """Return a linear layer's weights with its bias as the last column."""
    found = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    joined: Floats = np.c_[found["weight"], found["bias"]].astype(np.float32)
    return joined


def area_under_curve(inside: list[float], outside: list[float]) -> float:
    """Return the probability that a score of the first kind is greater than one of the second."""
    wins = np.subtract.outer(np.array(inside), np.array(outside))
    return float(((wins > 0) + 0.5 * (wins == 0)).mean())


def attack(train: Callable[[list[Data], Watch, int], Floats], sites: list[Data], runs: int) -> float:
    """Return the area under the curve over runs with and without one more record in the first site's data."""
    inside, outside = list[float](), list[float]()
    for run in range(runs):
        generator = torch.Generator().manual_seed(1000 + run)
        image, label = (
            torch.rand((1, PIXELS), generator=generator),
            torch.randint(CLASSES, (1,), generator=generator),
        )
        record = image.numpy(), label.numpy()
        more = np.concatenate([sites[0][0], record[0]]), np.concatenate([sites[0][1], record[1]])
        for scores, first, seed in ((inside, more, 2 * run), (outside, sites[0], 2 * run + 1)):
            found: list[float] = []

            def watch(weights: Floats, seen: Floats, record: Data = record, found: list[float] = found) -> None:
                direction = -gradient(weights, *record)
                found.append(float((seen * direction).sum() / np.linalg.norm(direction)))

            train([first, *sites[1:]], watch, seed)
            scores.append(sum(found))
    return area_under_curve(inside, outside)


def bench(directory: Path, runs: int, private_runs: int) -> Iterator[Row]:
    """Yield a row for each way."""
    inputs, labels = read(directory, "train")
    test_inputs, test_labels = read(directory, "t10k")
    sites = [(inputs[site:RECORDS:SITES], labels[site:RECORDS:SITES]) for site in range(SITES)]

    def accuracy(weights: Floats) -> float:
        return float(((test_inputs @ weights[:, :-1].T + weights[:, -1]).argmax(1) == test_labels).mean())

    def ignore(_weights: Floats, _seen: Floats) -> None:
        return

    for what, (applied, spent) in filters().items():
        update, steps = local_update(
            np.zeros((CLASSES, PIXELS + 1), np.float32), sites[0], torch.Generator().manual_seed(0)
        )
        seen = applied(update, steps)
        epsilon = PASSES * spent() or None  # of one site's one update, in each round
        exact = float(np.isclose(seen, update, rtol=1e-5, atol=0)[update != 0].mean())
        found = statistics.mean(accuracy(averaged(applied, sites, ignore, seed)) for seed in range(3))
        area = attack(partial(averaged, applied), sites, runs)
        yield Row(what, epsilon, found, exact, area, runs)
    for stated in (8.0, 3.0):
        found = statistics.mean(accuracy(private(stated, sites, ignore, seed)) for seed in range(3))
        area = attack(partial(private, stated), sites, private_runs)
        yield Row("d2pfed, records", stated, found, None, area, private_runs)


def read(directory: Path, part: str) -> Data:
    """Return MNIST's images, from 0 to 1, and labels."""
    content = [
        gzip.decompress(next(directory.glob(f"{part}-{kind}*.gz")).read_bytes()) for kind in ("images", "labels")
    ]
    images, labels = np.frombuffer(content[0], np.uint8, offset=16), np.frombuffer(content[1], np.uint8, offset=8)
    return images.reshape(-1, PIXELS).astype(np.float32) / np.float32(255), labels.astype(np.int64)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--private-runs", type=int, default=25)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    about, rows = surroundings(), list[Row]()
    for row in bench(chosen.directory, chosen.runs, chosen.private_runs):
        rows.append(row)
        exact = "-" if row.exact is None else f"{row.exact:.1%}"
        print(
            f"{row.what:22} epsilon {row.epsilon}  accuracy {row.accuracy:.1%}  exact {exact}  area {row.area:.2f}"
        )
        if chosen.out is not None:
            write(chosen.out, about, {"filters": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
