"""Two steps of the proofs: the theta function's ratio, and the sum of wrapped numbers."""

from itertools import product

import mpmath

from reproduction.errata.finding import Finding

DIGITS = 40
SIGMA = CENTRE = mpmath.mpf("0.5")


def gaussian_mass(sigma: mpmath.mpf, centre: mpmath.mpf) -> mpmath.mpf:
    """Return the sum over all integers x of exp(-(x - centre)^2 / (2 sigma^2)), term by term."""
    with mpmath.workdps(DIGITS):
        reach = int(mpmath.ceil(abs(centre) + 16 * sigma + 4))
        return mpmath.fsum(mpmath.exp(-((x - centre) ** 2) / (2 * sigma**2)) for x in range(-reach, reach + 1))


def printed_mass(centre: mpmath.mpf) -> mpmath.mpf:
    """Return the expression that the proof prints for it: sqrt(pi) theta(pi centre, exp(-pi^2)), without sigma."""
    with mpmath.workdps(DIGITS):
        return mpmath.sqrt(mpmath.pi) * mpmath.jtheta(3, mpmath.pi * centre, mpmath.exp(-(mpmath.pi**2)))


def poisson_mass(sigma: mpmath.mpf, centre: mpmath.mpf) -> mpmath.mpf:
    """Return it by Poisson's summation: sqrt(2 pi) sigma theta(pi centre, exp(-2 pi^2 sigma^2))."""
    with mpmath.workdps(DIGITS):
        nome = mpmath.exp(-2 * (mpmath.pi * sigma) ** 2)
        return mpmath.sqrt(2 * mpmath.pi) * sigma * mpmath.jtheta(3, mpmath.pi * centre, nome)


def renyi_excess(order: mpmath.mpf, shift: int, sigma: mpmath.mpf) -> mpmath.mpf:
    """Return the discrete Gaussian's Renyi divergence for a whole shift, less that of the continuous one."""
    with mpmath.workdps(DIGITS):
        ratio = gaussian_mass(sigma, (1 - order) * shift) / gaussian_mass(sigma, mpmath.mpf(0))
        return mpmath.log(ratio) / (order - 1)


def wrap(value: int, modulus: int) -> int:
    """Return the paper's phi_q in steps: the representative nearest to zero, q odd."""
    half = (modulus - 1) // 2
    return (value + half) % modulus - half


def gaussian_ratio(sigma: mpmath.mpf, centre: mpmath.mpf) -> mpmath.mpf:
    """Return the sum around a centre over the sum around 0, which step (2) of the proof bounds by 1."""
    return gaussian_mass(sigma, centre) / gaussian_mass(sigma, mpmath.mpf(0))


def printed_ratio(centre: mpmath.mpf) -> mpmath.mpf:
    """Return what the proof prints for it: sqrt(pi) theta(pi centre, exp(-pi^2)) / theta(0, 1 / e)."""
    with mpmath.workdps(DIGITS):
        return printed_mass(centre) / mpmath.jtheta(3, 0, mpmath.exp(-1))


def findings() -> tuple[Finding, ...]:
    """Return what is true of both steps; neither harms its theorem."""
    return _theta(), _sum_of_wrapped()


def _theta() -> Finding:
    ratio, right = gaussian_ratio(SIGMA, CENTRE), poisson_mass(SIGMA, CENTRE) / poisson_mass(SIGMA, mpmath.mpf(0))
    excess = ", ".join(
        f"{float(mpmath.chop(renyi_excess(mpmath.mpf(order), 1, SIGMA), mpmath.mpf(10) ** -30)):.3g} at order {order}"
        for order in ("1.5", "2", "3")
    )
    return Finding(
        topic="theta function",
        claim="the sum of exp(-(x - c)^2 / (2 sigma^2)) over the lattice, divided by the sum at c = 0, is sqrt(pi) "
        "theta(pi c, exp(-pi^2)) / theta(0, 1/e), which is at most 1",
        where="Proof of the theorem on the discrete Gaussian, step (2)",
        truth=f"that is the case 2 sigma^2 = 1: at sigma = 0.5, c = 0.5 the ratio is {mpmath.nstr(ratio, 4)}, the "
        f"expression {mpmath.nstr(printed_ratio(CENTRE), 4)}. Right is theta(pi c, q) / theta(0, q) with q = "
        f"exp(-2 pi^2 sigma^2), here {mpmath.nstr(right, 4)}, which is at most 1 too: the theorem holds. The "
        f"divergence at sigma = 0.5 and shift 1, less the continuous Gaussian's: {excess}",
        how=f"summed term by term in {DIGITS} digits over the integers",
        remedy="the corrected identity; nothing that is built on the theorem changes",
    )


def _sum_of_wrapped() -> Finding:
    checked = 0
    for modulus in (3, 5, 7, 9):
        span = range(-2 * modulus, 2 * modulus + 1)
        for left, right in product(span, span):
            once = wrap(wrap(left, modulus) + wrap(right, modulus), modulus)
            if once != wrap(left + right, modulus):
                raise ArithmeticError(f"wrapping is no homomorphism modulo {modulus}")
            checked += 1
    return Finding(
        topic="sum of phi_q",
        claim="sum of phi_q(x) = phi_q(sum of x)",
        where="Lemma in the proof that secure aggregation keeps the guarantee",
        truth=f"q = 3: phi(1) + phi(1) = {wrap(1, 3) + wrap(1, 3)}, but phi(1 + 1) = {wrap(2, 3)}; true is "
        "phi(sum of phi(x)) = phi(sum of x), which needs one more wrap by the server, and is what the proof uses",
        how=f"counterexample; the corrected identity checked for {checked} pairs modulo 3 to 9, more by induction",
        remedy="the server wraps the sum once more",
    )
