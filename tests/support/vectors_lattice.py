"""Test vectors of the lattice protocol: what `tests/vectors/v2/lattice.json` holds, and how they are made."""

import hashlib
import json
import sys
from dataclasses import replace

from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import wire
from d2pfed.secagg.heads import encode_head
from d2pfed.secagg.heads import head_of as head_of_roster
from d2pfed.secagg.lattice import field as fields
from d2pfed.secagg.lattice import masks
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.wire import MessageKind
from support.federation import MODEL, TASK, enrolment_secret, position_of
from support.lattice import EXCHANGES, LatticeFederation, make_session, small_committee
from support.rosters import AUTHORITY
from support.vectors_secagg import FOLDER

FILE = FOLDER / "lattice.json"
ROUNDS = {  # a committee smaller than its cohort, and rings of words of two and of four bytes
    "signed": {"bits": 10, "secret": 20, "dimension": 6, "signed": True},
    "by slot": {"bits": 11, "secret": 17, "dimension": 4, "by_slot": True},
    "assumed": {"bits": 18, "secret": 33, "dimension": 3, "signed": False},
}


def make() -> dict:
    """Attempts by identity, by slot, and where nobody is enrolled, each with clients and members that are missing."""
    return {name: make_round(**settings) for name, settings in ROUNDS.items()}


def make_round(**settings) -> dict:
    session = make_session(26, committee=replace(small_committee(24), threshold=2), **settings)
    federation = LatticeFederation(session, seed=b"vectors")
    names = {"convene": session.members[5], "vouch": session.members[1]}
    names |= {"contribute": session.cohort[9], "open": session.members[11]}
    absent = {name: federation.identity(client) for name, client in names.items()}
    federation.loss = lambda name, client, answer: None if absent.get(name) == client else answer
    identities = {name: federation.identity(name) for name in session.cohort}
    log, answer = {name: {} for name in EXCHANGES}, federation.answer

    def noting(name, client, data):
        said = answer(name, client, data)
        log[name][client] = data, said
        return said

    federation.answer = noting
    first = identities[session.cohort[0]]
    remembered = {first: position_of(first, 1, federation.roster)} if session.is_signed else {}
    agreeing = federation.gather(remembered=remembered)
    opened = federation.open(agreeing)
    for name in session.members:
        if federation.members[identities[name]].trace:
            request = wire.message(session, MessageKind.LATTICE_TRACE_REQUEST, session.rank(name))
            federation.answer("trace", identities[name], request)
    whole = identities[session.members[0]]
    return {
        "session": _session(session),
        "digest": session.digest.hex(),
        "task": TASK.hex(),
        "model": MODEL.hex(),
        "context": agreeing._survivors.context.hex(),
        "nonce": agreeing._survivors.nonce.hex(),
        "statement": agreeing._total.statement.hex(),
        "identities": [identities[name] for name in session.cohort],
        "authority": AUTHORITY.hex(),
        "signing": {str(name): enrolment_secret(client).hex() for name, client in identities.items()},
        "members": {
            str(name): Entropy.replay(b"vectors")
            .child("convene", identities[name])
            .child("d2pfed lattice member", session.digest, name)
            .key.hex()
            for name in session.members
        },
        "remembered": {str(name): remembered[c].pack().hex() for name, c in identities.items() if c in remembered},
        "positions": {
            str(name): federation.position(client, 1).pack().hex() for name, client in identities.items()
        }
        if session.is_signed
        else {},
        "clients": {str(name): _draws(session, client, federation) for name, client in identities.items()},
        "silent": names["vouch"],  # whose signature of the adverts was lost
        "survivors": [name for name, client in identities.items() if client in agreeing.survivors],
        "messages": {
            exchange: {
                str(name): [_digest(data) for data in found[client]]
                for name, client in identities.items()
                if client in found
            }
            for exchange, found in log.items()
        },
        "head": encode_head(head_of_roster(federation.roster), AUTHORITY).hex() if session.is_by_slot else "",
        "slip": federation.certified.slip(session.cohort[0]).hex() if session.is_by_slot else "",
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
        "is_by_slot": session.is_by_slot,
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
