"""The page on private means, docs/mean.md, and its plot: written from the stored rows of `scripts/bench mean`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.mean import CURVE, DELTA, LONGEST_MEAN

RESULTS = record.RESULTS / "mean.json"
_HEAD = """# The error of a private mean

Each of n clients holds a vector of d numbers with random signs and length 1. The ratio is the mean squared error over
that of a trusted server that adds Gaussian noise at the same epsilon: at 1, distributing trust costs nothing. The
guarantee holds against the server, for replace-one and delta {delta:g}. All clients answer, none colludes, and the bits
suffice for means of length up to {longest:g}.

![Error against bits](img/mean.png)

*Error by bits per coordinate, n = {clients:,}, d = {dimension}. A mechanism is missing where the bits cannot hold its
sum.*

## Sizes

Each cell is the ratio, with bits per coordinate in brackets. It averages at least {least:,} squared errors, so its
relative standard error is at most {spread:.0%}. It is empty where the mechanism cannot meet the target. `1/4` and
`1/16` fold the vector to that share of its coordinates.

"""

_PUBLISHED = """
## What others report

- Kairouz, Liu and Steinke (2021): `ddgauss` essentially matches central privacy with less than 16 bits per value.
- Agarwal, Kairouz and Liu (2021): `skellam` has the accuracy of the continuous Gaussian, at low precision as well.
- Chen, Choquette-Choo, Kairouz and Suresh (2022): about min(n² ε², d) bits per client suffice and are necessary, up to
  logarithms; sparse random projections train with 1.2 bits per parameter.
- Chen, Özgür and Kairouz (2022): the Poisson binomial mechanism, which d2pfed does not have.
"""


def write(docs: Path, results: Path = RESULTS) -> Iterator[Path]:
    """Write the page and its plot, if `scripts/bench mean` has left its rows."""
    if not results.exists():
        return
    found = json.loads(results.read_text())
    rows = found["benchmarks"]["mean"]["rows"]
    curve, grid = ([row for row in rows if row["what"] == what] for what in ("curve", "grid"))
    least = min(row["sums"] * row["dimension"] for row in rows)
    head = _HEAD.format(
        delta=DELTA,
        longest=LONGEST_MEAN,
        clients=CURVE[0],
        dimension=CURVE[1],
        least=least,
        spread=(2 / least) ** 0.5,
    )
    made = f"{_PUBLISHED}\nMade by `scripts/bench mean` ({record.line(found)}).\n"
    page, plot = docs / "mean.md", docs / "img" / "mean.png"
    page.write_text(head + "\n".join(_table(grid)) + "\n" + made)
    yield page
    _plot(curve, plot)
    yield plot


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    names.sort(key=lambda name: not name.startswith("centered"))
    cells = {
        (row["clients"], row["dimension"], row["epsilon"], row["mechanism"]): f"{row['ratio']:.3f} ({row['bits']})"
        for row in rows
    }
    yield "| n | d | ε | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "|---" * (3 + len(names)) + "|"
    for clients, dimension, epsilon in dict.fromkeys(key[:3] for key in cells):
        shown = [cells.get((clients, dimension, epsilon, name), "") for name in names]
        yield f"| {clients:,} | {dimension:,} | {epsilon:g} | " + " | ".join(shown) + " |"


def _plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - a benchmark runs without it

    epsilons = sorted({row["epsilon"] for row in rows})
    figure = Figure(figsize=(3.2 * len(epsilons), 3.6), dpi=160, layout="constrained")
    panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
    for axes, epsilon in zip(panels, epsilons, strict=True):
        for name in dict.fromkeys(row["mechanism"] for row in rows):
            points = [(r["bits"], r["ratio"]) for r in rows if r["mechanism"] == name and r["epsilon"] == epsilon]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
        axes.axhline(1.0, color="0.5", linestyle=":", label="trusted server")
        axes.set(title=f"epsilon {epsilon:g}", xlabel="bits per coordinate", yscale="log", ylim=(0.9, 40))
    figure.axes[0].set_ylabel("squared error / a trusted server's")
    figure.axes[-1].legend(frameon=False, fontsize=8)
    figure.savefig(path)
