"""Test vectors of secure aggregation: what `tests/vectors/v2/secagg_*.json` holds, and how they are made."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Consistency, Delivery, collect, crypto, encode_roster
from d2pfed.secagg.draws import DrawTree, draw_key
from d2pfed.secagg.pairwise.messages import EncryptedShares
from d2pfed.secagg.wire import HEADER_BYTES, VERSION, frame, kind_of
from support.federation import MODEL, TASK, Federation, advertising_of, enrolment_secret, make_session, position_of
from support.rosters import AUTHORITY, draw_cohort, roster_of

FOLDER = Path(__file__).parent.parent / "vectors" / f"v{VERSION}"
SIGNED = {"consistency": Consistency.SIGNED}
NINE = (2, 3, 5, 7, 11, 13, 17, 19, 2**64 - 1)

# By name: how the session differs, who is lost after the keys were shared, whose ciphertexts to whom are spoilt.
ROUNDS = {
    "complete": ({"threshold": 3, "quorum": 3}, {10}, set()),
    "larger": ({"cohort": NINE, "threshold": 5, "quorum": 8, "bits": 13}, {7}, set()),
    "everyone": ({"delivery": Delivery.EVERYONE, "quorum": 4, "bits": 21}, set(), set()),
    "signed": (SIGNED | {"quorum": 3}, {13}, set()),
    "drawn": (SIGNED | {"quorum": 3, "draw": 5}, set(), set()),
    "claims": (SIGNED | {"quorum": 3}, set(), set()),
    "missing": (SIGNED | {"quorum": 4, "colluders": 1}, set(), {(7, 13), (10, 16)}),
}
DEPTH = 3
POPULATION = tuple(range(4, 40, 5))


def make_federation(name):
    """The clients of one session, and what the server brings beside its numbers."""
    shape, _, _ = ROUNDS[name]
    shape, roster, opening = dict(shape), None, None
    if name == "drawn":
        tree = DrawTree(Entropy.replay(b"draws"), DEPTH)
        keys = {client: crypto.signing_public(enrolment_secret(client)) for client in POPULATION}
        roster, opening = roster_of(keys, depth=DEPTH, root=tree.root), tree.open(shape["draw"])
        sampling = CohortSampling(Sampling.FIXED, len(POPULATION), 4)
        key = draw_key(roster.digest, shape["draw"], opening.seed)
        shape |= {"cohort": draw_cohort(key, roster.clients, sampling, 0), "roster_digest": roster.digest}
    session = make_session(4, dimension=5, **shape)
    vectors = {
        client: np.array([(client * 7 + place * 31) % session.ring.modulus for place in range(5)], np.uint32)
        for client in session.cohort
    }
    federation = Federation(session, seed=b"vectors", vectors=vectors, roster=roster, opening=opening)
    if name == "claims":
        first, second, third = session.cohort[:3]
        meet = {
            first: {second: position_of(second, 4, federation.roster)},
            third: {
                first: position_of(first, 2, federation.roster),
                second: position_of(second, 5, federation.roster),
            },
        }
        federation = replace(federation, counts=dict.fromkeys(session.cohort, 6), known=meet)
        federation.remembered = {second: position_of(second, 3, federation.roster)}
    return federation


def spoil(spoilt, cohort, sent):
    """Ciphertexts that do not open, as if their senders had sealed nothing."""
    for sender, receiver in spoilt:
        rank, to = cohort.index(sender), cohort.index(receiver)
        ciphertexts = dict(sent[rank].ciphertexts)
        ciphertexts[to] = bytes(len(ciphertexts[to]))
        sent[rank] = EncryptedShares(ciphertexts, sent[rank].claims)


def make_round(name):
    """One session: what was agreed, the clients' secrets, every message, the sum."""
    return _run(name, make_federation(name))


def _run(name, federation):
    _, dropped, spoilt = ROUNDS[name]
    session, log = federation.session, []
    remembered = getattr(federation, "remembered", {})

    def exchange(phase):
        def run(outbox):
            for client in outbox:
                if phase == "mask" and client in dropped:
                    continue
                answer = federation.clients[client].receive(outbox[client])
                log.append({"client": client, "request": outbox[client].hex(), "answer": answer.hex()})
                yield client, answer

        return run

    advertising = advertising_of(federation, remembered)
    collect(advertising, exchange("advertise"))
    sharing = advertising.close()
    collect(sharing, exchange("share"))
    spoil(spoilt, session.cohort, sharing._sent)
    masking = sharing.close(TASK, MODEL)
    collect(masking, exchange("mask"))
    confirming = masking.close()
    collect(confirming, exchange("confirm"))
    unmasking = confirming.close()
    collect(unmasking, exchange("unmask"))
    total, joined = unmasking.close(), unmasking._aggregate.known.joined
    root = Entropy.replay(b"vectors")
    histories = {client: federation.history(client) for client in session.cohort}
    return {
        "session": {
            "plan_digest": session.plan_digest.hex(),
            "run": session.run,
            "round": session.round,
            "attempt": session.attempt,
            "roster_digest": session.roster_digest.hex(),
            "draw": session.draw,
            "block": session.block,
            "cohort": list(session.cohort),
            "dimension": session.dimension,
            "bits": session.bits,
            "threshold": session.threshold,
            "quorum": session.quorum,
            "colluders": session.colluders,
            "delivery": session.delivery.value,
            "consistency": session.consistency.value,
        },
        "roster": encode_roster(federation.roster, AUTHORITY).hex() if federation.roster else "",
        "opening": (
            [federation.opening.seed.hex(), *(node.hex() for node in federation.opening.path)]
            if federation.opening
            else []
        ),
        "digest": session.digest.hex(),
        "adverts_digest": joined.digest.hex(),
        "task": TASK.hex(),
        "model": MODEL.hex(),
        "entropy": {str(client): root.child(client).key.hex() for client in session.cohort},
        "signing": {str(client): enrolment_secret(client).hex() for client in session.cohort},
        "positions": {str(client): own.position.pack().hex() for client, own in histories.items() if own},
        "known": {
            str(client): {str(other): met.pack().hex() for other, met in own.known.items()}
            for client, own in histories.items()
            if own
        },
        "remembered": {str(client): met.pack().hex() for client, met in remembered.items()},
        "spoilt": [list(pair) for pair in sorted(spoilt)],
        "vectors": {str(client): vector.tolist() for client, vector in federation.vectors.items()},
        "exchanges": log,
        "survivors": list(unmasking.survivors),
        "sum": total.vector.tolist(),
        "blamed": list(total.blamed),
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
            "another version": data[:4] + b"\x01" + data[5:],
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
