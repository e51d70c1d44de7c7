"""Errata of the paper, each computed: what is claimed, where, what is true, how that is shown, and what to do."""

import math
from collections.abc import Sequence
from fractions import Fraction

from matplotlib.figure import Figure

from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.rotation import Hadamard
from d2pfed.runs.report.plots import Ink
from reproduction.communication import centered_bits, integer_bits, literal_bits
from reproduction.errata import identities, moments, observers, practice, sensitivity, shares
from reproduction.errata.finding import COLUMNS, Finding
from reproduction.error import Case, Measured, corrected_bound, published_bound, shared_noise, simulate
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
    errors = [simulate(case, shared_noise, entropy.child("error", case.dimension)) for case in MEAN_CASES]
    context.report("the remaining errata", 0.7)
    found = (
        *sensitivity.findings(),
        *shares.findings(curves, cohorts, entropy.child("masks")),
        _error(errors),
        _bits(),
        *identities.findings(),
        *observers.findings(entropy.child("observers")),
        *practice.findings(),
        moments.finding(),
    )
    return Result(
        name="errata",
        title="Errata, each demonstrated",
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


def _error(measured: Sequence[Measured]) -> Finding:
    real, steps = (
        " and ".join(f"{published_bound(case, float(sigma)):.3g}" for case, sigma in pairs)
        for pairs in (
            [(case, case.sigma) for case in MEAN_CASES],
            [(case, case.sigma_steps) for case in MEAN_CASES],
        )
    )
    found = " and ".join(f"{each.mean:.3f} +- {each.deviation:.3f}" for each in measured)
    corrected = " and ".join(f"{corrected_bound(case):.3f}" for case in MEAN_CASES)
    settings = " and ".join(
        f"{case.rounds} times with d = {case.dimension}, N = {case.cohort_size}, k = {case.levels}, "
        f"sigma = {float(case.sigma):g}"
        for case in MEAN_CASES
    )
    return Finding(
        topic="error of the mean",
        claim=f"in two settings at most {real} (sigma in real units) or {steps} (in steps: the paper has both)",
        where="Theorem on the mean squared error",
        truth=f"{found} simulated, with the standard error; the corrected bound is {corrected}",
        how=f"Algorithm 1 simulated {settings}; D = 1, gamma = 1. All shares are of one draw, so the noise does not "
        "average out over clients",
        remedy="the corrected bound d s^2 / (4 N) + d sigma^2 / N^2, s the step",
    )


def _bits() -> Finding:
    said = "; ".join(
        f"k = {levels}: {math.ceil(literal)} bits ({literal:.1f}) with shares nu / N, {math.ceil(whole)} ({whole:.1f}) "
        f"with integer shares"
        for levels in LEVELS
        for literal, whole in [(literal_bits(INFIMNIST, levels), integer_bits(INFIMNIST, levels))]
    )
    ours = centered_bits(INFIMNIST, Hadamard(INFIMNIST.dimension))
    return Finding(
        topic="bits a coordinate",
        claim="two bytes (figures); n (d log(n q + 1) + O(1)) bits for all (theorem), where q must be the range of one "
        "client, and is the size of the group in Algorithm 1",
        where="Evaluation; theorem on the communication cost",
        truth=f"{said}; {ours} bits with independent noise of the same size on the sum. Two bytes do for integer "
        "shares, and not for those of Algorithm 1",
        how="range of the sum of N = 100 clients on INFIMNIST and of the noise, cut so that a round overflows with "
        "probability at most 1e-3",
        remedy="integer shares, or noise around the vector itself",
    )


def _words() -> tuple[str, ...]:
    stands = (
        "The paper's central idea, discrete Gaussian noise for federated learning with Renyi accounting, stands: its "
        "theorem on the discrete Gaussian is right, and at practical orders its privacy corollary holds for the number "
        "of levels it is stated for, although the sensitivity theorem beneath it does not."
    )
    changes = (
        "What must change before anyone relies on it are the shares of a common noise: masks as printed do not hide "
        "them, one missing client lets the server read the noise, and every client knows it. Noise that each client "
        "draws for itself, on the lattice, avoids all three and needs fewer bits."
    )
    code = (
        "Errata that begin with *Code* set the paper beside its authors' public code, "
        "github.com/wanglun1996/discrete-dp at commit f33d1e5 unless another is named: what it does was read there, "
        "what follows is computed here."
    )
    return stands, changes, code


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
