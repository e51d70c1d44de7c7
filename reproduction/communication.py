"""What a client uploads: bytes by the paper's figures, bits that the sum really needs, and messages as measured."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from d2pfed.noise.codec import Codec
from d2pfed.noise.mechanisms import LEAST_WIDTH, Centered
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.numerics.ring import MAX_BITS, Ring, RingVector
from d2pfed.numerics.rotation import Hadamard, RandomPhase
from d2pfed.plan.widths import wrap_probability
from d2pfed.round import gather
from d2pfed.secagg import Client, Consistency, Contribute, Delivery, Session
from d2pfed.secagg.pairwise.session import least_threshold
from d2pfed.secagg.wire import ClientId
from reproduction.result import Cell, Context, Result, Size, Table
from reproduction.setting import CIFAR10, INFIMNIST, Setting

OVERFLOW = 1e-3  # the chance that any coordinate of a round's sum wraps
SEED = b"table-comm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What one system sends for each coordinate: bits by the paper, and bits that the sum needs."""

    system: str
    levels: int | None
    coordinates: int
    paper_bits: int | None
    bits: float  # base-2 logarithm of the values that must be told apart
    basis: str

    @property
    def whole_bits(self) -> int:
        """Return the bits of a word that holds it."""
        return math.ceil(self.bits)


def sum_range(setting: Setting, levels: int) -> int:
    """Return how many values the sum of a full cohort takes, the shared noise cut where it hardly ever lies."""
    length = Hadamard(setting.dimension).padded
    reach = math.ceil(float(setting.sigma_steps(levels)) * math.sqrt(2 * math.log(2 * length / OVERFLOW)))
    return setting.cohort_size * (levels - 1) + 2 * reach + 1


def integer_bits(setting: Setting, levels: int) -> float:
    """Return the bits of a coordinate if the noise is split into integer shares: the range of the sum."""
    return math.log2(sum_range(setting, levels))


def literal_bits(setting: Setting, levels: int) -> float:
    """Return the bits of a coordinate for shares nu / N as printed: they live on a lattice N times finer."""
    return math.log2(setting.cohort_size * sum_range(setting, levels))


def centered_bits(setting: Setting, rotation: Hadamard | RandomPhase) -> int:
    """Return the bits for clients that each draw around their own vector, with the same noise on the sum."""
    width = Fraction(LEAST_WIDTH)
    granularity = float(setting.sigma) / (float(width) * math.sqrt(setting.cohort_size))
    codec = Codec(rotation=rotation, clip=float(setting.clip), granularity=granularity, fraction_bits=14)
    rings = (Ring(bits) for bits in range(1, MAX_BITS + 1))
    return next(
        ring.bits
        for ring in rings
        if wrap_probability(codec, Centered(width), ring, setting.cohort_size, setting.cohort_size) <= OVERFLOW
    )


def theorem_levels(setting: Setting) -> int:
    """Return sqrt(d) + 1, made a whole odd number."""
    levels = math.isqrt(setting.dimension) + 1
    return levels if levels % 2 else levels - 1


def uploads(setting: Setting) -> Iterator[Upload]:
    """Return what each system sends in one round."""
    padded = Hadamard(setting.dimension).padded
    yield Upload(
        system="non-private, float32",
        levels=None,
        coordinates=setting.dimension,
        paper_bits=32,
        bits=32.0,
        basis="as it is",
    )
    coins = setting.cohort_size * (setting.binomial_levels - 1) + setting.binomial_trials + 1
    yield Upload(
        system="cpSGD",
        levels=setting.binomial_levels,
        coordinates=padded,
        paper_bits=24,
        bits=math.log2(coins),
        basis="N (k - 1) + coins + 1 values",
    )
    yield from _paper_uploads(setting, padded)
    for name, rotation in (
        ("Hadamard", Hadamard(setting.dimension)),
        ("random phases", RandomPhase(setting.dimension)),
    ):
        yield Upload(
            system=f"ours: centered, {name}",
            levels=None,
            coordinates=rotation.padded,
            paper_bits=None,
            bits=float(centered_bits(setting, rotation)),
            basis="least ring that hardly ever wraps, the same noise on the sum",
        )


def session_of(setting: Setting, upload: Upload) -> Session:
    """Return a session of the real protocol that carries such an upload, a tenth of the clients allowed to drop out."""
    tolerated = setting.cohort_size // 10
    return Session(
        run="table-comm",
        round=0,
        attempt=0,
        plan_digest=digest("table-comm"),
        cohort=tuple(range(setting.cohort_size)),
        dimension=upload.coordinates,
        bits=upload.whole_bits,
        threshold=least_threshold(setting.cohort_size, tolerated),
        quorum=setting.cohort_size - tolerated,
        colluders=tolerated,
        delivery=Delivery.QUORUM,
        consistency=Consistency.ASSUMED,
    )


def measure(session: Session) -> int:
    """Run all exchanges of a session between its clients and a server, and return the most that a client sent."""
    root = Entropy.replay(SEED)
    clients = {client: Client(session, client, _zero(session), root.child(client)) for client in session.cohort}
    sent = dict.fromkeys(session.cohort, 0)

    def exchange(outbox: Mapping[ClientId, bytes]) -> Iterable[tuple[ClientId, bytes]]:
        for client in outbox:
            answer = clients[client].receive(outbox[client])
            sent[client] += len(answer)
            yield client, answer

    gather(session, b"", exchange).unmask()
    return max(sent.values())


def make(context: Context) -> Result:
    """Compare uploads in both of the paper's settings."""
    return compare((INFIMNIST, CIFAR10), context)


def compare(settings: tuple[Setting, ...], context: Context) -> Result:
    """Compare the upload of each system by the paper, as needed and as measured."""
    pairs = [(setting, upload) for setting in settings for upload in uploads(setting)]
    rows = []
    for number, (setting, upload) in enumerate(pairs):
        context.report(f"uploads, {setting.name}: {upload.system}", number / len(pairs))
        measured = measure(session_of(setting, upload)) if _is_measured(upload, context.size) else None
        rows.append(_row(setting, upload, measured))
    return Result(
        name="table-comm",
        title="What a client uploads in a round",
        table=Table(
            (
                "setting",
                "system",
                "levels",
                "coordinates sent",
                "bits by the paper",
                "bits needed",
                "bytes by the paper",
                "bytes needed",
                "bytes measured, whole protocol",
                "how",
            ),
            tuple(rows),
        ),
        words=_words(),
        ran={"overflow": OVERFLOW, "seed": SEED.decode(), "dropouts allowed": "a tenth of the cohort"},
        reduced="measured for our own uploads only" if context.size is Size.QUICK else "",
    )


def _paper_uploads(setting: Setting, padded: int) -> Iterator[Upload]:
    for levels in (setting.levels, theorem_levels(setting)):
        for name, bits in (("literal", literal_bits), ("integer", integer_bits)):
            yield Upload(
                system=f"D2P-Fed, {name} shares",
                levels=levels,
                coordinates=padded,
                paper_bits=16,
                bits=bits(setting, levels),
                basis="N (k - 1) + noise + 1 values" + (", N times finer" if name == "literal" else ""),
            )
    yield Upload(
        system="D2P-Fed, by its theorem",
        levels=None,
        coordinates=padded,
        paper_bits=16,
        bits=math.log2(setting.cohort_size * 2**16 + 1),
        basis="log2(N q + 1) for a client's q of two bytes",
    )


def _is_measured(upload: Upload, size: Size) -> bool:
    return upload.system.startswith("ours") or (size is Size.FULL and "shares" in upload.system)


def _row(setting: Setting, upload: Upload, measured: int | None) -> tuple[Cell, ...]:
    return (
        setting.name,
        upload.system,
        upload.levels,
        upload.coordinates,
        upload.paper_bits,
        upload.bits,
        None if upload.paper_bits is None else setting.dimension * upload.paper_bits // 8,
        Ring(upload.whole_bits).packed_bytes(upload.coordinates),
        measured,
        upload.basis,
    )


def _words() -> tuple[str, str]:
    literal, whole = (math.ceil(bits(INFIMNIST, INFIMNIST.levels)) for bits in (literal_bits, integer_bits))
    ours = centered_bits(INFIMNIST, Hadamard(INFIMNIST.dimension))
    shares = (
        f"Shares nu / N as printed lie on a lattice N times finer than L, so that on INFIMNIST (k = 21) a coordinate "
        f"needs {literal} bits, more than the figures' two bytes; the same noise in integer shares needs {whole}, "
        f"and independent noise of the same size on the sum {ours}."
    )
    padding = (
        "The paper's figures count the model's own parameters; with Hadamard's rotation 65,536 coordinates travel for "
        "51,370 parameters, and 1,048,576 for 996,298."
    )
    return shares, padding


def _zero(session: Session) -> Contribute:
    def contribute(task: bytes, model: bytes, group_seed: bytes | None) -> RingVector:  # noqa: ARG001 - only sizes are measured
        return np.zeros(session.dimension, np.uint32)

    return contribute
