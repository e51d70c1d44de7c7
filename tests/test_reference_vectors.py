"""The reference numbers are current, and a second implementation of a part of them agrees."""

import json
import math
import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from d2pfed.accounting import Accountant, Adjacency, CohortSampling, Sampling, epsilon_of
from d2pfed.accounting.losses import FINE

ROOT = Path(__file__).parent.parent
KNOWN = json.loads((ROOT / "docs" / "reference" / "vectors.json").read_text())
EPSILONS, MASKS = KNOWN["epsilons"], KNOWN["masks"]


def differences(known, made, path="") -> list[str]:
    """Return where two values of JSON differ by more than rounding."""
    if isinstance(known, dict) and isinstance(made, dict):
        found = [path] if known.keys() != made.keys() else []
        return found + [
            each
            for key in known.keys() & made.keys()
            for each in differences(known[key], made[key], f"{path}/{key}")
        ]
    if isinstance(known, list) and isinstance(made, list):
        found = [path] if len(known) != len(made) else []
        pairs = enumerate(zip(known, made, strict=False))
        return found + [each for i, pair in pairs for each in differences(*pair, f"{path}/{i}")]
    if isinstance(known, float) and isinstance(made, float):
        return [] if math.isclose(known, made, rel_tol=1e-9) else [path]
    return [] if known == made else [path]


def test_the_reference_numbers_are_current():
    made = json.loads(json.dumps(runpy.run_path(str(ROOT / "scripts" / "vectors"))["vectors"]()))
    assert differences(KNOWN, made) == []


def test_a_changed_number_is_noticed():
    changed = json.loads(json.dumps(KNOWN))
    changed["epsilons"]["gaussian"][0]["epsilon"] *= 1 + 1e-7
    changed["masks"]["sum"][1] += 1
    assert sorted(differences(KNOWN, changed)) == ["/epsilons/gaussian/0/epsilon", "/masks/sum/1"]


def gaussian_delta(epsilon: float, ratio: float) -> float:
    def tail(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    return tail(epsilon / ratio - ratio / 2) - math.exp(epsilon) * tail(epsilon / ratio + ratio / 2)


@pytest.mark.parametrize("case", EPSILONS["gaussian"], ids=lambda case: str(case["ratio"]))
def test_gaussians_have_the_delta_of_their_tails(case):
    assert gaussian_delta(case["epsilon"], case["ratio"]) == pytest.approx(case["delta"], rel=1e-6)


@pytest.mark.parametrize("case", EPSILONS["caps"], ids=lambda case: str(case["cohort_size"]))
def test_caps_cost_a_binomial_tail(case):
    rate, others = Fraction(case["cohort_size"], case["population"] - 1), case["attempts"] - 1
    below = sum(math.comb(others, k) * rate**k * (1 - rate) ** (others - k) for k in range(case["cap"]))
    kappa = case["attempts"] * Fraction(case["cohort_size"], case["population"]) * (1 - below)
    assert float(kappa) <= case["kappa"] == pytest.approx(float(kappa), rel=1e-8)


@pytest.mark.parametrize("case", EPSILONS["cohorts"][:4], ids=lambda case: f"{case['epsilon']:.3g}")
def test_a_grid_eight_times_as_fine_is_less_than_1e_4_below(case):
    drawn = CohortSampling(Sampling.FIXED, case["population"], case["cohort_size"])
    given = case["noise_multiplier"], drawn, case["rounds"]
    as_stated = {"adjacency": Adjacency(case["adjacency"]), "delta": case["delta"], "accountant": Accountant.PLD}
    finer = epsilon_of(*given, **as_stated, points=8 * FINE)
    assert finer <= case["epsilon"] <= (1 + 1e-4) * finer


def eta(width: float) -> float:
    return 2 * sum(math.exp(-2 * (math.pi * width * m) ** 2) for m in range(1, 9))


@pytest.mark.parametrize("case", EPSILONS["sums"], ids=lambda case: str(case["contributors"]))
def test_sums_are_near_one_discrete_gaussian(case):
    gaps = [eta(case["width"] * math.sqrt(k / (k + 1))) for k in range(1, case["contributors"])]
    assert math.fsum(math.log1p(gap) - math.log1p(-gap) for gap in gaps) == pytest.approx(case["tau"], rel=1e-6)
    whole = case["width"] * math.sqrt(case["contributors"])
    assert whole * (1 - 0.3) < case["sigma"] < whole


@pytest.mark.parametrize("case", KNOWN["encodings"], ids=lambda case: f"{case['rotation']} {case['clip']:g}")
def test_centers_are_the_clipped_rotated_update_and_within_the_radius(case):
    centers, rotated = np.array(case["centers"]), np.array(case["rotated"])
    longest = max(np.linalg.norm(rotated), np.linalg.norm(case["update"]))  # a fold may lengthen
    assert int(centers @ centers) <= case["grid_radius"] ** 2
    wanted = rotated * min(1.0, case["clip"] / longest) / case["granularity"] * 256
    assert np.abs(centers - wanted).max() <= 1 + 4 * (
        case["clip"] == 1
    )  # what shrinks aims a little below the radius


def uniform(key: str, length: int) -> np.ndarray:
    """Return a mask modulo 2^8: one byte of the keystream each."""
    cipher = Cipher(algorithms.AES(bytes.fromhex(key)), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(length)), np.uint8).astype(np.int64)


def masked_vector(client: str) -> list[int]:
    length = len(MASKS["vectors"][client])
    total = np.array(MASKS["vectors"][client]) + uniform(MASKS["self_mask_keys"][client], length)
    for pair, key in MASKS["pair_mask_keys"].items():
        low, high = pair.split(",")
        total += uniform(key, length) * ((client == low) - (client == high))
    return (total % 256).tolist()


def test_masked_vectors_follow_from_their_keys_and_survivors_add_up():
    for client, known in MASKS["masked"].items():
        assert masked_vector(client) == known
        assert bytes(known).hex() == MASKS["packed"][client]
    kept = map(str, MASKS["survivors"])
    assert (sum(np.array(MASKS["vectors"][client]) for client in kept) % 256).tolist() == MASKS["sum"]


def test_masked_vectors_are_those_of_the_recorded_session():
    session = json.loads((ROOT / "tests" / "vectors" / "v2" / "secagg_complete.json").read_text())
    answers = [each["answer"] for each in session["exchanges"]]
    assert session["sum"] == MASKS["sum"]
    for client in MASKS["survivors"]:
        assert any(answer.endswith(MASKS["packed"][str(client)]) for answer in answers)
