"""Who is protected from whom: clients that know the noise, and a server that knows the cohort."""

import math
from fractions import Fraction

import numpy as np

from d2pfed.accounting import Accountant, Adjacency, CohortSampling, Sampling, epsilon_of
from d2pfed.accounting.profiles import gaussian_epsilon
from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import Share, Shared
from d2pfed.noise.sampler import DiscreteGaussian
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import IntVector
from d2pfed.numerics.rotation import Hadamard
from reproduction.errata.finding import Finding
from reproduction.setting import CLAIMED_SENSITIVITY, DELTA, INFIMNIST, Setting
from reproduction.synthetic import directions

SIGMA = Fraction(24)  # steps: INFIMNIST's sigma at k = 21
CLIENTS, DIMENSION = 20, 4096


def released_epsilon(setting: Setting, multiplier: float, accountant: Accountant) -> float:
    """Return epsilon of all rounds for one who sees models only, amplified by the random cohorts."""
    return epsilon_of(
        multiplier,
        CohortSampling(Sampling.FIXED, setting.population, setting.cohort_size),
        setting.rounds,
        adjacency=Adjacency.REPLACE_ONE,
        delta=DELTA,
        accountant=accountant,
    )


def server_epsilon(multiplier: float, max_participations: int) -> float:
    """Return epsilon for one who knows the cohorts, of a client that took part so many times: exact, unamplified."""
    return gaussian_epsilon(DELTA, math.sqrt(max_participations) / multiplier)


def subtracted_fraction(seed_of_reader: Entropy, entropy: Entropy) -> float:
    """Return the fraction of coordinates that are the noiseless sum once the reader's idea of the noise is subtracted.

    The clients of the cohort derive the noise from `entropy.child("group")`; whoever holds that derives it too.
    """
    group = entropy.child("group")
    codec = Codec(rotation=Hadamard(DIMENSION), clip=0.25, granularity=0.025)
    updates = 0.25 * directions(CLIENTS, DIMENSION, 0.0, entropy.child("updates"))
    mechanism, seed = Shared(SIGMA), digest("rotation", entropy.key)
    opened = np.zeros(DIMENSION, np.int64)
    truth = np.zeros(DIMENSION, np.int64)
    for rank, update in enumerate(updates):
        centres, own = codec.prepare(update, seed), entropy.child("client", rank)
        opened += mechanism.encode(centres, Share(rank, CLIENTS, group), own)
        truth += mechanism.rounded.encode(centres, own)
    noise: IntVector = DiscreteGaussian(SIGMA).draw(DIMENSION, seed_of_reader.child("noise").stream())
    return float(np.mean(opened - noise == truth))


def findings(entropy: Entropy) -> tuple[Finding, ...]:
    """Return what clients and the server may learn."""
    return _clients(entropy), _server()


def _clients(entropy: Entropy) -> Finding:
    member = subtracted_fraction(entropy.child("group"), entropy)
    stranger = subtracted_fraction(entropy.child("another group"), entropy)
    return Finding(
        topic="every client knows the noise",
        claim="the clients share a seed and generate the same noise; the same seed serves secure aggregation",
        where="Section on the algorithm, paragraph on the discrete Gaussian mechanism",
        truth=f"any client of the cohort subtracts it and reads the noiseless sum on {member:.0%} of coordinates (with "
        f"another seed {stranger:.1%}), for itself or for the server: no privacy towards clients, whom the threat "
        "model leaves out, nor towards a server that one of them helps. The seeds of secure aggregation belong to "
        "pairs or to one client; it has no secret of the whole cohort",
        how=f"simulated with integer shares, {CLIENTS} clients, {DIMENSION} coordinates, sigma of {SIGMA} steps",
        remedy="each client draws its own noise; or one client, named by the cohort, draws all of it, so that one "
        "knows it instead of all",
    )


def _server() -> Finding:
    claimed = float(INFIMNIST.sigma / (CLAIMED_SENSITIVITY * INFIMNIST.clip))
    honest = float(INFIMNIST.sigma / (2 * INFIMNIST.clip))
    published = released_epsilon(INFIMNIST, claimed, Accountant.WBK_MIRONOV)
    tight = released_epsilon(INFIMNIST, claimed, Accountant.PLD)
    return Finding(
        topic="amplification and the server",
        claim=f"epsilon {published:.3f} after {INFIMNIST.rounds} rounds (INFIMNIST, sigma = 0.6), amplified by "
        "sub-sampling; the adversary is an honest but curious server",
        where="Threat model; Evaluation",
        truth=f"granted the sensitivity 4 D, that holds for one who sees the models and no cohorts, and is loose "
        f"({tight:.3f}). The server draws the cohorts, so nothing is amplified against it: one participation costs "
        f"{server_epsilon(claimed, 1):.2f}, and three, as some clients of {INFIMNIST.population:,} have, "
        f"{server_epsilon(claimed, 3):.2f} (with the sensitivity 2 D of unrounded vectors "
        f"{server_epsilon(honest, 1):.2f} and {server_epsilon(honest, 3):.2f})",
        how="the paper's accountant and sensitivity 4 D; loss distributions; exact Gaussian curve; all at delta = 1e-5",
        remedy="one epsilon for each observer; against the server a cap on participations that clients enforce, best "
        "of all one round per client",
    )
