"""Errata of the paper, each computed: what is claimed, where, what is true, how that is shown, and what to do."""

import math
from fractions import Fraction

from matplotlib.figure import Figure

from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import Hadamard
from d2pfed.runs.report.plots import Ink
from reproduction.communication import centered_bits, integer_bits, literal_bits
from reproduction.errata import identities, moments, observers, practice, sensitivity, shares
from reproduction.errata.finding import COLUMNS, Finding
from reproduction.error import Case, corrected_bound, published_bound, shared_noise, simulate
from reproduction.result import Context, Result, Table
from reproduction.setting import INFIMNIST

SEED = b"errata"
LEVELS = (21, 227)  # the experiments' and, nearly, sqrt(51370) + 1
MEAN_CASES = (
    Case(dimension=256, cohort_size=10, levels=17, sigma=Fraction("0.6"), rounds=300),
    Case(dimension=1024, cohort_size=50, levels=33, sigma=Fraction("2.4"), rounds=400),
)


def make(context: Context) -> Result:
    """Run every demonstration, and draw how much of the noise a server reads when clients drop out."""
    entropy = Entropy.replay(SEED)
    context.report("the dropout attack", 0.0)
    cohorts = _cohorts(entropy)
    curves = shares.recovered_curves(cohorts)
    context.report("the error of the mean", 0.5)
    errors = tuple(_error(case, entropy.child("error", case.dimension)) for case in MEAN_CASES)
    context.report("the remaining errata", 0.7)
    found = (
        *sensitivity.findings(),
        *shares.findings(curves, cohorts),
        *errors,
        *(_bits(levels) for levels in LEVELS),
        *identities.findings(),
        *observers.findings(entropy.child("observers")),
        *practice.findings(),
        moments.finding(),
    )
    return Result(
        name="errata",
        title="Errata, each computed",
        table=Table(COLUMNS, tuple(finding.row() for finding in found)),
        words=_words(),
        ran={
            "seed": SEED.decode(),
            "attack": "N = 100, d = 51370, sigma = 0.6, D = 0.25, the last clients of the cohort missing",
            "recovered by clients missing": curves,
        },
        draw=lambda figure: _draw(figure, curves),
    )


def _cohorts(entropy: Entropy) -> dict[str, tuple[shares.Cohort, int]]:
    few, many = LEVELS
    wanted = {
        f"k = {few}": (few, 0.0),
        f"k = {many}": (many, 0.0),
        f"k = {many}, clients agree": (many, shares.ALIGNED),
    }
    return {
        name: (shares.cohort_of(INFIMNIST, levels, cosine, entropy.child(name)), levels)
        for name, (levels, cosine) in wanted.items()
    }


def _error(case: Case, entropy: Entropy) -> Finding:
    measured = simulate(case, shared_noise, entropy)
    real, steps = (published_bound(case, float(sigma)) for sigma in (case.sigma, case.sigma_steps))
    return Finding(
        topic="error of the mean",
        claim=f"at most {real:.3g} (sigma in real units) or {steps:.3g} (in steps)",
        where="Theorem on the mean squared error",
        truth=f"{measured.mean:.3f} +- {measured.deviation:.3f} simulated; corrected bound {corrected_bound(case):.3f}",
        how=f"Algorithm 1 simulated {case.rounds} times: d = {case.dimension}, N = {case.cohort_size}, "
        f"k = {case.levels}, sigma = {float(case.sigma)}, D = 1; the "
        f"shares are of one draw, so it does not average out over clients",
        remedy="the corrected bound d s^2 / (4 N) + d sigma^2 / N^2",
    )


def _bits(levels: int) -> Finding:
    literal, whole = (bits(INFIMNIST, levels) for bits in (literal_bits, integer_bits))
    ours = centered_bits(INFIMNIST, Hadamard(INFIMNIST.dimension))
    return Finding(
        topic=f"bits a coordinate, k = {levels}",
        claim="two bytes (figures); n (d log(n q + 1) + O(1)) bits, q a client's range, but the group in Algorithm 1",
        where="Evaluation; theorem on the communication cost",
        truth=f"{math.ceil(literal)} bits ({literal:.1f}) with shares nu / N; {math.ceil(whole)} ({whole:.1f}) with "
        f"integer shares, for which two bytes are enough; {ours} with independent noise of the same size on the sum",
        how="range of the sum of N = 100 clients and the noise, overflow at most 1e-3 a round",
        remedy="integer shares, or noise around the vector itself",
    )


def _words() -> tuple[str, str]:
    stands = (
        "The paper's central idea, discrete Gaussian noise for federated learning with Renyi accounting, stands: its "
        "theorem on the discrete Gaussian is right, and at practical orders its privacy corollary holds for the number "
        "of levels it is stated for, although the sensitivity theorem beneath it does not."
    )
    changes = (
        "What must change before anyone relies on it are the shares of a common noise: one missing client lets the "
        "server read the noise, and every client knows it. Noise that each client draws for itself avoids both and "
        "needs fewer bits."
    )
    return stands, changes


def _draw(figure: Figure, curves: dict[str, tuple[float, ...]]) -> None:
    axes = figure.subplots()
    looks = ((Ink.MAIN, "o", "-"), (Ink.LIMIT, "s", "-"), (Ink.THIRD, "^", "--"))
    for (name, curve), (ink, marker, dashes) in zip(curves.items(), looks, strict=True):
        heights = [100 * fraction for fraction in curve]
        axes.plot(
            range(len(heights)), heights, color=ink, marker=marker, linestyle=dashes, markersize=4, label=name
        )
    axes.set(
        xlabel="clients missing of 100 (dips: the survivors' number and 100 have a common divisor)",
        ylabel="coordinates whose noise the server reads, %",
        ylim=(0, 104),
        xticks=range(0, shares.MOST_MISSING + 1, 2),
        title="Shares nu / N as printed: one missing client gives the noise away",
    )
    figure.legend(frameon=False, loc="outside lower center", ncols=len(curves))
    axes.grid(color=Ink.GRID, linewidth=0.5)
