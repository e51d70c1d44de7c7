"""The heads of a client's log: each row's head is the hash of the row and of the head before it."""

from d2pfed.numerics.randomness import digest

HEAD_BYTES = 32


def first_head(authority: bytes, client: int) -> bytes:
    """Return the head of a log without rows: it names the client and who enrolled it, by its public key."""
    return digest("d2pfed log", authority, client)


def next_head(head: bytes, number: int, kind: str, body: bytes) -> bytes:
    """Return the head after row `number`, counted from 1.

    Guarantee: whoever knows a head knows every row before it, since SHA-256 has no known collisions.
    Checked: test_position.py::test_a_head_depends_on_every_row_before_it.
    """
    return digest("d2pfed log", head, number, kind, body)
