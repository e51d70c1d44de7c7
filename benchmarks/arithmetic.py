"""Speed of samplers, rotations, packing and encoding, beside peers and the limits of the machine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np
import scipy.fft

from benchmarks.peers import attempt
from benchmarks.reference_sampler import discrete_gaussian
from benchmarks.timing import Speed, Work, measure
from d2pfed.noise.sampler import CenteredDiscreteGaussian, DiscreteGaussian
from d2pfed.numerics.randomness import Entropy
from d2pfed.numerics.ring import Ring
from d2pfed.numerics.rotation import Hadamard, RandomPhase, Rotation

DIMENSIONS = (51_370, 996_298, 1 << 24)
THREADS = (1, 2)

_SIGMA = Fraction(2)
_FRACTION_BITS = 8
_ENTROPY = Entropy.replay(b"bench arithmetic")
_KEYSTREAM_WORDS = 1 << 14
_ENCODE_DIMENSION = 996_298
_ENCODE_RATE = 40e6


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Rates in coordinates per second; `goal` is the least ratio to the peer, where one is set."""

    what: str
    dimension: int
    threads: int
    rate: float
    first_call_seconds: float
    peer: str
    peer_rate: float | None
    goal: float | None
    peer_error: str = ""  # one line, where the peer is absent or has failed

    @property
    def ratio(self) -> float | None:
        """Return how many times the peer's rate it is, or None without a peer."""
        return None if self.peer_rate is None else self.rate / self.peer_rate

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None if there is none to meet."""
        return None if self.ratio is None or self.goal is None else self.ratio >= self.goal


@dataclass(frozen=True, slots=True)
class Peer:
    """What a work is compared with, the least ratio that is wished, if any, and the modules that it needs."""

    name: str
    work: Work
    goal: Callable[[int], float | None]
    needs: tuple[str, ...] = ()


def arithmetic(
    dimensions: Iterable[int] = DIMENSIONS,
    threads: Iterable[int] = THREADS,
    encode: Callable[[int], Callable[[], object]] | None = None,
) -> list[SpeedRow]:
    """Measure everything in one run; `encode(dimension)` returns a function that encodes one client's vector."""
    counts = tuple(threads)
    rows: list[SpeedRow] = []
    for dimension in dimensions:
        for work, peers in _comparisons():
            rows += _compare(work, peers, dimension, counts)
        if encode is not None:
            work = Work("whole client encode", encode)
            rows += _compare_encode(work, dimension, counts)
    return rows


def _compare(work: Work, peers: tuple[Peer, ...], dimension: int, threads: tuple[int, ...]) -> Iterator[SpeedRow]:
    """Compare with each peer on one thread, and with itself on more."""
    alone = measure(work, dimension, 1)
    for peer in peers:
        speed, error = attempt(peer.needs, partial(measure, peer.work, dimension, 1))
        row = _row(work, dimension, 1, alone, (peer.name, speed.rate if speed else None, peer.goal(dimension)))
        yield replace(row, peer_error=error)
    for count in threads:
        if count > 1:
            yield _row(work, dimension, count, measure(work, dimension, count), ("one thread", alone.rate, None))


def _compare_encode(work: Work, dimension: int, threads: tuple[int, ...]) -> Iterator[SpeedRow]:
    """Compare with the rate that is wished, and two threads with one: twice as fast within a quarter."""
    alone = measure(work, dimension, 1)
    is_goal = dimension == _ENCODE_DIMENSION
    yield _row(work, dimension, 1, alone, ("40 million a second", _ENCODE_RATE, 1.0 if is_goal else None))
    for count in threads:
        if count > 1:
            goal = 0.75 * count if is_goal else None
            yield _row(work, dimension, count, measure(work, dimension, count), ("one thread", alone.rate, goal))


def _row(
    work: Work, dimension: int, threads: int, speed: Speed, peer: tuple[str, float | None, float | None]
) -> SpeedRow:
    return SpeedRow(
        what=work.name,
        dimension=dimension,
        threads=threads,
        rate=speed.rate,
        first_call_seconds=speed.first_call_seconds,
        peer=peer[0],
        peer_rate=peer[1],
        goal=peer[2],
    )


def _comparisons() -> Iterator[tuple[Work, tuple[Peer, ...]]]:
    aes = Work("AES-CTR, 8 bytes each", _prepare_keystream)
    opendp = Work("OpenDP", _prepare_opendp, largest=2000)
    yield (
        Work("discrete Gaussian, sigma 2", _prepare_gaussian),
        (
            _peer(aes, 1 / 4),
            Peer(opendp.name, opendp, lambda _: 1000.0, ("opendp",)),
            _peer(Work("exact sampler in Python's fractions", _prepare_reference, largest=1000), None),
        ),
    )
    # 60 million a second where the keystream comes at 5 GB/s
    yield Work("centred discrete Gaussian, sigma 2", _prepare_centred), (_peer(aes, 60e6 / (5e9 / 8)),)
    dct = Work("scipy's DCT", _prepare_dct)
    goal = Peer(dct.name, dct, lambda dimension: 3.0 if dimension <= 1 << 20 else 1.5)
    yield Work("Hadamard rotation", _prepare_rotation(Hadamard)), (goal,)
    yield Work("random-phase rotation", _prepare_rotation(RandomPhase)), (_peer(dct, None),)
    copy = Work("copy of the vector", _prepare_copy)
    for bits in (8, 11, 16, 20):
        copy_peer = _peer(copy, 1 / 3 if bits in (8, 16) else 1 / 6)
        numpy_peer = _peer(Work("numpy's bit strings", _prepare_numpy_pack(bits), largest=1 << 20), None)
        yield Work(f"pack {bits} bits", _prepare_pack(bits)), (copy_peer, numpy_peer)
        yield Work(f"unpack {bits} bits", _prepare_unpack(bits)), (copy_peer,)


def _peer(work: Work, goal: float | None) -> Peer:
    return Peer(work.name, work, lambda _: goal)


def _prepare_keystream(dimension: int) -> Callable[[], object]:
    stream = _ENTROPY.stream()
    buffer = np.empty(min(dimension, _KEYSTREAM_WORDS), np.uint64)

    def run() -> None:
        for start in range(0, dimension, buffer.size):
            stream.fill(buffer[: dimension - start])

    return run


def _prepare_gaussian(dimension: int) -> Callable[[], object]:
    stream, gaussian = _ENTROPY.stream(), DiscreteGaussian(_SIGMA)
    return lambda: gaussian.draw(dimension, stream)


def _prepare_centred(dimension: int) -> Callable[[], object]:
    stream, gaussian = _ENTROPY.stream(), CenteredDiscreteGaussian(_SIGMA, _FRACTION_BITS)
    centres = (stream.words(dimension) >> np.uint64(50)).astype(np.int64) - (1 << 13)
    return lambda: gaussian.draw(centres, stream)


def _prepare_reference(dimension: int) -> Callable[[], object]:
    stream = _ENTROPY.stream()
    return lambda: [discrete_gaussian(Fraction(0), _SIGMA * _SIGMA, stream) for _ in range(dimension)]


def _prepare_opendp(dimension: int) -> Callable[[], object]:
    import opendp.prelude as dp  # noqa: PLC0415 - a peer that need not be installed

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    mechanism = dp.m.make_gaussian(*space, scale=float(_SIGMA))
    zeros = [0] * dimension
    return lambda: mechanism(zeros)


def _floats(dimension: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return (_ENTROPY.stream().words(dimension) / 2.0**63 - 1).astype(np.float32)


def _prepare_rotation(kind: Callable[[int], Rotation]) -> Callable[[int], Callable[[], object]]:
    def prepare(dimension: int) -> Callable[[], object]:
        rotation, vector, seed = kind(dimension), _floats(dimension), _ENTROPY.key
        return lambda: rotation.forward(vector, seed)

    return prepare


def _prepare_dct(dimension: int) -> Callable[[], object]:
    vector = _floats(Hadamard(dimension).padded)
    return lambda: scipy.fft.dct(vector, norm="ortho")


def _ring_vector(dimension: int, bits: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return Ring(bits).uniform(_ENTROPY.stream(), dimension)


def _prepare_copy(dimension: int) -> Callable[[], object]:
    return _ring_vector(dimension, 32).copy


def _prepare_pack(bits: int) -> Callable[[int], Callable[[], object]]:
    def prepare(dimension: int) -> Callable[[], object]:
        ring, values = Ring(bits), _ring_vector(dimension, bits)
        return lambda: ring.pack(values)

    return prepare


def _prepare_unpack(bits: int) -> Callable[[int], Callable[[], object]]:
    def prepare(dimension: int) -> Callable[[], object]:
        ring = Ring(bits)
        data = ring.pack(_ring_vector(dimension, bits))
        return lambda: ring.unpack(data, dimension)

    return prepare


def _prepare_numpy_pack(bits: int) -> Callable[[int], Callable[[], object]]:
    def prepare(dimension: int) -> Callable[[], object]:
        columns = _ring_vector(dimension, bits).view(np.uint8).reshape(-1, 4)
        return lambda: np.packbits(
            np.unpackbits(columns, axis=1, count=bits, bitorder="little"), bitorder="little"
        )

    return prepare
