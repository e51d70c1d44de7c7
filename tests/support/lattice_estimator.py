"""What known attacks on learning with errors cost, in the core-SVP model: 2^(0.292 beta) for blocks of size beta.

Errors and secrets have the same deviation (normal form: a wider secret is exchanged for errors of further samples).
"""

from math import e, exp, log, log2, pi, sqrt, tanh

import numpy as np

CLASSICAL = 0.292


def log_root_hermite(block):
    """The logarithm of the root Hermite factor that reduction with blocks of this size reaches (Chen, Nguyen)."""
    return np.log((pi * block) ** (1 / block) * block / (2 * pi * e)) / (2 * (block - 1))


def primal_block(length: int, modulus: int, deviation: float) -> int:
    """The least block that finds the secret as a unique shortest vector (Alkim, Ducas, Poppelmann, Schwabe).

    The projection of (error, secret, 1) must be shorter than the Gram-Schmidt vector at which it is looked for, in a
    lattice of the best number of samples: deviation sqrt(beta) <= delta^(2 beta - d - 1) q^(m / d), d = m + length + 1.
    """
    samples = np.arange(1, 5 * length)
    dimension = samples + length + 1

    def found(block: int) -> bool:
        reach = (2 * block - dimension - 1) * log_root_hermite(block) + samples / dimension * log(modulus)
        return bool((log(deviation) + log(block) / 2 <= reach[dimension >= block]).any())

    low, high = 50, 8 * length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def primal_bits(length: int, modulus: int, deviation: float) -> float:
    return CLASSICAL * primal_block(length, modulus, deviation)


def dual_bits(length: int, modulus: int, deviation: float) -> float:
    """The dual attack that guesses a part of the secret and finds another by a Fourier transform (MATZOV).

    A sieve gives 2^(0.2075 beta) short dual vectors at once; if more are needed it is run again. Guessed coordinates
    are enumerated by their entropy, transformed ones are switched to the small modulus p.
    """
    primal = primal_block(length, modulus, deviation)
    blocks = np.arange(int(0.7 * primal), int(1.15 * primal), 3)[:, None, None, None, None]
    moduli = np.array([2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64])  # wide noise takes large ones
    small = moduli[None, :, None, None, None]
    guessed = np.arange(0, 61, 10)[None, None, :, None, None]
    transformed = np.arange(0, 231, 10)[None, None, None, :, None]
    samples = (length * np.array([0.85, 1.0, 1.15]))[None, None, None, None, :]
    rest = length - guessed - transformed
    dimension = samples + rest
    entropy = (0.5 + log(sqrt(2 * pi) * deviation) + log(1 / tanh(pi**2 * deviation**2))) / log(2)
    size = (samples * log(deviation) + rest * log(deviation * modulus)) / dimension
    size = (
        size
        + 0.5 * log(4 / 3)
        + 0.5 * np.log(blocks / (2 * pi * e))
        + (dimension - blocks) * log_root_hermite(blocks)
    )
    bias = 4 * np.exp(2 * (size + log(pi) - log(modulus))) + transformed / 3 * (deviation * pi / small) ** 2
    vectors = bias / log(2) + np.log2(guessed * entropy + transformed * np.log(small) + log(2))
    reduction = CLASSICAL * blocks + np.maximum(0, vectors - 0.2075 * blocks)
    transform = 10 + np.log2(np.maximum(transformed, 1)) + (transformed + 1) * np.log2(small)
    spread = exp(8 * pi**2 * deviation**2 * exp(-2 * pi**2 * deviation**2) * tanh(pi**2 * deviation**2))
    tries = guessed * (log2(2 * spread / sqrt(e)) + entropy) - log2(1 - exp(-1 / 2 / deviation**2))
    guessing = tries + np.logaddexp2(transform, log2(640) + vectors)
    return float(np.logaddexp2(reduction, guessing).min())
