"""Whole sessions as test vectors: `python tests/vectors_secagg.py` writes them; other bytes are a new version."""

import json
import sys
from pathlib import Path

import numpy as np

from d2pfed.randomness import Entropy
from d2pfed.secagg import Consistency, Delivery
from d2pfed.wire import HEADER_BYTES, VERSION, frame, kind_of
from federation import MODEL, Federation, enrolment_secret, make_session, run_round

FOLDER = Path(__file__).parent / "vectors" / f"v{VERSION}"
ROUNDS = {
    "complete": ({"threshold": 3, "quorum": 3}, {10}),
    "sparse": ({"cohort": (2, 3, 5, 7, 11, 2**64 - 1), "degree": 4, "threshold": 3, "quorum": 5, "bits": 13}, {7}),
    "designated": ({"delivery": Delivery.DESIGNATED, "quorum": 3}, {7}),
    "everyone": ({"delivery": Delivery.EVERYONE, "quorum": 4}, set()),
    "signed": ({"consistency": Consistency.SIGNED, "quorum": 3}, {13}),
}


def make_round(name):
    """One session: what was agreed, the clients' secrets, every message, the sum."""
    shape, dropped = ROUNDS[name]
    session = make_session(4, dimension=5, **shape)
    vectors = {
        client: np.array([(client * 7 + place * 31) % session.ring.modulus for place in range(5)], np.uint32)
        for client in session.cohort
    }
    federation = Federation(session, seed=b"vectors", vectors=vectors)
    log = []
    for client in session.cohort:
        kept = federation.clients[client].receive

        def receive(request, client=client, kept=kept):
            answer = kept(request)
            log.append({"client": client, "request": request.hex(), "answer": answer.hex()})
            return answer

        federation.clients[client].receive = receive
    total, survivors = run_round(
        federation, lambda phase, client, answer: None if phase == "mask" and client in dropped else answer
    )
    root = Entropy.replay(b"vectors")
    return {
        "session": {
            "run": session.run,
            "round": session.round,
            "attempt": session.attempt,
            "plan_digest": session.plan_digest.hex(),
            "cohort": list(session.cohort),
            "dimension": session.dimension,
            "bits": session.bits,
            "degree": session.degree,
            "threshold": session.threshold,
            "quorum": session.quorum,
            "delivery": session.delivery.value,
            "consistency": session.consistency.value,
        },
        "digest": session.digest.hex(),
        "designated": session.designated,
        "neighbours": {
            str(c): [session.cohort[r] for r in session.graph.partners(session.rank(c))] for c in session.cohort
        },
        "model": MODEL.hex(),
        "entropy": {str(client): root.child(client).key.hex() for client in session.cohort},
        "signing": {str(client): enrolment_secret(client).hex() for client in session.cohort},
        "vectors": {str(client): vector.tolist() for client, vector in vectors.items()},
        "exchanges": log,
        "survivors": list(survivors),
        "sum": total.vector.tolist(),
    }


def make_bad(good):
    """Requests to the first client that it must refuse, each at its place in the exchanges of a good session."""
    client = good["session"]["cohort"][0]
    own = [entry for entry in good["exchanges"] if entry["client"] == client]
    binding = bytes.fromhex(good["digest"])
    cases = []
    for place, entry in enumerate(own):
        data = bytes.fromhex(entry["request"])
        kind, body = kind_of(data), data[HEADER_BYTES:]
        flipped = bytes([*body[:-1], body[-1] ^ 0x80])
        for why, bad in {
            "empty": b"",
            "header only": data[:HEADER_BYTES],
            "a byte is missing": data[:-1],
            "a byte too many": data + b"\0",
            "damaged body": data[:HEADER_BYTES] + flipped,
            "another version": data[:4] + b"\x02" + data[5:],
            "another kind": frame(kind + 1, binding, client, body),
            "another client": frame(kind, binding, client + 1, body),
            "another session": frame(kind, bytes(32), client, body),
            "body cut short": frame(kind, binding, client, body[: len(body) // 2]),
        }.items():
            cases.append({"place": place, "why": why, "request": bad.hex()})
    return {"good": "secagg_complete.json", "cases": cases}


def main():
    for name in ROUNDS:
        _write(f"secagg_{name}", make_round(name))
    _write("secagg_bad_requests", make_bad(make_round("complete")))


def _write(name, value):
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
