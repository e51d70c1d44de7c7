"""What attacks do with ring vectors, and no client or server does."""

from d2pfed.numerics.ring import Ring, RingVector


def subtract_into(ring: Ring, total: RingVector, values: RingVector) -> None:
    """Subtract in place."""
    ring.add_into(total, (-values) & (ring.modulus - 1))
