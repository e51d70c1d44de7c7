"""Test vectors of the lattice protocol: what `tests/vectors/v2/lattice.json` holds, and how they are made."""

import hashlib
import json
import sys
from dataclasses import replace

from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import wire
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.wire import MessageKind
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.lattice import EXCHANGES, LatticeFederation, make_session, small_committee
from support.vectors_secagg import FOLDER

FILE = FOLDER / "lattice.json"
ROUNDS = {  # a committee smaller than its cohort, and rings of words of two and of four bytes
    "signed": {"bits": 10, "secret": 20, "dimension": 6, "signed": True},
    "assumed": {"bits": 18, "secret": 33, "dimension": 3, "signed": False},
}


def make() -> dict:
    """A signed attempt and one where nobody is enrolled, each with clients and members that are missing."""
    return {name: make_round(**settings) for name, settings in ROUNDS.items()}


def make_round(**settings) -> dict:
    session = make_session(26, committee=replace(small_committee(24), threshold=2), **settings)
    absent = {"convene": session.members[5], "contribute": session.cohort[9], "open": session.members[11]}
    federation = LatticeFederation(
        session, seed=b"vectors", loss=lambda name, client, answer: None if absent.get(name) == client else answer
    )
    log, answer = {name: {} for name in EXCHANGES}, federation.answer

    def noting(name, client, data):
        said = answer(name, client, data)
        log[name][client] = data, said
        return said

    federation.answer = noting
    first = session.cohort[0]
    remembered = {first: position_of(first, 1, federation.roster)} if session.is_signed else {}
    agreeing = federation.gather(remembered=remembered)
    opened = federation.open(agreeing)
    for member in session.members:
        if federation.members[member].trace:
            federation.answer(
                "trace", member, wire.message(session, MessageKind.LATTICE_TRACE_REQUEST, session.rank(member))
            )
    whole = session.members[0]
    return {
        "session": _session(session),
        "digest": session.digest.hex(),
        "task": TASK.hex(),
        "model": MODEL.hex(),
        "context": agreeing._survivors.context.hex(),
        "nonce": agreeing._survivors.nonce.hex(),
        "statement": agreeing._total.statement.hex(),
        "signing": {str(client): enrolment_secret(client).hex() for client in session.cohort},
        "members": {
            str(member): Entropy.replay(b"vectors")
            .child("convene", member)
            .child("d2pfed lattice member", session.digest, member)
            .key.hex()
            for member in session.members
        },
        "remembered": {str(client): position.pack().hex() for client, position in remembered.items()},
        "positions": {str(client): federation.position(client, 1).pack().hex() for client in session.cohort}
        if session.is_signed
        else {},
        "clients": {str(client): _draws(session, client, federation) for client in session.cohort},
        "survivors": list(agreeing.survivors),
        "messages": {
            name: {str(client): [_digest(data) for data in pair] for client, pair in found.items()}
            for name, found in log.items()
        },
        "whole": {name: [data.hex() for data in found[whole]] for name, found in log.items() if whole in found},
        "sum": opened.vector.tolist(),
    }


def _session(session) -> dict:
    committee = session.committee
    names = ("run", "round", "attempt", "draw", "block", "dimension", "bits", "secret", "quorum", "colluders")
    return {name: getattr(session, name) for name in names} | {
        "plan_digest": session.plan_digest.hex(),
        "roster_digest": session.roster_digest.hex(),
        "cohort": list(session.cohort),
        "members": list(session.members),
        "threshold": committee.threshold,
        "packed": committee.packed,
        "certificate": committee.certificate,
        "committee_colluders": committee.colluders,
    }


def _draws(session, client, federation) -> dict:
    """What a client draws: the secret, the seed, the key, and the uniform values of its polynomials."""
    entropy, committee = Entropy.replay(b"vectors").child("contribute", client), session.committee
    count, openers = session.polynomials, committee.openers
    uniform = fields.elements(entropy.child("shares").stream(), openers * (count + 2)).reshape(openers, count + 2)
    return {
        "vector": federation.vector(client).tolist(),
        "secret": masks.draw_secret(session, entropy.child("secret")).tolist(),
        "seed": fields.elements(entropy.child("seed").stream(), sessions.SEED_ELEMENTS).tolist(),
        "key": entropy.child("key").key.hex(),
        "uniform": uniform[committee.packed :, :count].T.tolist(),
        "seed_uniform": uniform[: committee.threshold, count].tolist(),
        "blinding": uniform[:, count + 1].tolist(),
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main():
    FILE.write_text(json.dumps(make(), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
