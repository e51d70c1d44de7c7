"""What a plan says that a client sends and receives, held against every byte that its transport is given."""

import time
from hashlib import sha256

import numpy as np
import pytest

from d2pfed.deploy.client import PrivateClient
from d2pfed.deploy.config import init_client, make_secret, read_client_config
from d2pfed.deploy.layout import Layout, encode_task
from d2pfed.deploy.requests import Blob, ExchangeRequest, RequestKind, RunAnnouncement
from d2pfed.deploy.rosters import make_draws, next_roster
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.numerics.randomness import Entropy, digest
from d2pfed.plan import PrivacyTarget, calibrate
from d2pfed.plan.traffic import traffic_of
from d2pfed.round import Attempt, session_of
from d2pfed.secagg import crypto
from d2pfed.secagg.draws import DrawTree, draw_key, draw_order
from d2pfed.secagg.heads import CertifiedRoster, encode_head, head_of
from d2pfed.secagg.lattice import messages
from d2pfed.secagg.lattice import session as sessions
from d2pfed.secagg.lattice.session import Request
from support.enrolled_clients import anchor_in, directory_of, write_settings
from support.malicious_server import add_one

ENROLLED, DEPTH = 100_000, 12
# The default job, deployed: `d2pfed plan --consistency signed --download-bits 8`.
JOB = PrivacyTarget(
    population=ENROLLED,
    cohort_size=1_000,
    rounds=50,
    dimension=19_354,
    epsilon=1.0,
    against="server",
    sampling="once",
    compression=2_048,
    colluders=0.1,
    dropouts=0.1,
    consistency="signed",
    longest_mean=0.5,
    download_bits=8,
)


def secret_of(client: int) -> bytes:
    return digest("the key of an enrolled client", client)


class Deployment:
    """A server of 100,000 enrolled clients, of whom one is real: for members of the committee the test signs."""

    def __init__(self, directory, plan):
        self.plan, self.secret = plan, make_authority(directory)
        committed = make_draws(directory / "draws", DEPTH)
        kept = (directory / "draws").read_bytes()
        self.roster = next_roster(
            crypto.signing_public(self.secret),
            None,
            added={client: crypto.signing_public(secret_of(client)) for client in range(ENROLLED)},
            removed=frozenset(),
            shown={},
            draws=committed,
            most_depth=DEPTH,
            days=30,
            now=int(time.time()),
            entropy=Entropy.system(),
        )
        self.opening = DrawTree(Entropy(kept[1:], is_replayed=False), kept[0]).open(0)
        key = draw_key(self.roster.digest, 0, self.opening.seed)
        order = draw_order(key, self.roster.clients, plan.sampling, 0)  # of slots: identities are the slots here
        certified = CertifiedRoster(self.roster, bytes(128 * ENROLLED))
        named = Attempt(16 * "r", 0, 0)
        self.session = session_of(plan, named, tuple(sorted(order)), roster=certified, order=order)
        self.certified = CertifiedRoster(self.roster, self.signatures())
        self.client = next(slot for slot in self.session.cohort if slot not in self.session.members)
        self.layout = Layout.of({"params": np.zeros(plan.dimension, np.float32)})

    def signatures(self) -> bytes:
        """The authority's, for those of the cohort alone: 100,000 would take half a minute."""
        signed = bytearray(128 * ENROLLED)
        for slot in self.session.cohort:
            key, floor = self.roster.keys[slot], self.roster.floors[slot]
            enrolled = digest("d2pfed enrolment", self.roster.digest, slot, slot, key)
            stands = digest("d2pfed floor", self.roster.digest, slot, *floor)
            both = crypto.sign(self.secret, enrolled) + crypto.sign(self.secret, stands)
            signed[128 * slot : 128 * (slot + 1)] = both
        return bytes(signed)

    def announcement(self) -> RunAnnouncement:
        head, slip = encode_head(head_of(self.roster), self.secret), self.certified.slip(self.client)
        return RunAnnouncement(self.session.run, canonical.encode(self.plan), self.layout.encode(), 0, head, slip)

    def request(self, model: bytes) -> bytes:
        session, members = self.session, self.session.members
        keys = {place: crypto.Agreement(digest("a", slot)).public for place, slot in enumerate(members)}
        statement = sessions.adverts_statement(session, keys)
        vouchers = {
            place: messages.Signer(crypto.sign(secret_of(slot), statement), self.certified.certificate(slot))
            for place, slot in enumerate(members[: session.committee.vouchers])
        }
        task = encode_task(self.layout, {"server-round": 1})
        request = Request(session, keys, task, sessions.model_digest(model))
        frame = messages.encode_request(request, session.rank(self.client), vouchers, self.opening, None)
        blob = Blob(model, sha256(model).digest())
        return ExchangeRequest(frame, 60.0, 600.0).encode(blob, is_beside=True)


def make_authority(directory) -> bytes:
    make_secret(directory / "authority.key")
    return (directory / "authority.key").read_bytes()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    return Deployment(tmp_path_factory.mktemp("deployment"), calibrate(JOB))


def carried(deployment, place) -> tuple[int, int]:
    """Have an ordinary client join a run and contribute; how many bytes it sends and receives for it."""
    client, authority = deployment.client, deployment.roster.authority
    init_client(directory_of(place, client), client, authority, anchor_in(place, client))
    (directory_of(place, client) / "key").write_bytes(secret_of(client))
    write_settings(place, client, authority, {})
    node = PrivateClient(read_client_config(directory_of(place, client)), 1, {}, add_one(0))
    announced = deployment.announcement()
    model = encode_model(np.zeros(deployment.plan.dimension, np.float32), deployment.plan.download_bits)
    requests = [
        (RequestKind.ANNOUNCEMENT, announced.greeting.encode()),
        (RequestKind.ANNOUNCEMENT, announced.encode()),
        (RequestKind.EXCHANGE, deployment.request(model)),
    ]
    answers = [node.answer(kind, data) for kind, data in requests]
    size = messages.contribution_bytes(deployment.session, deployment.session.committee.size)
    assert len(answers[-1]) == size  # its one message
    return sum(map(len, answers)), sum(len(data) for _, data in requests)


def test_a_client_of_100000_sends_and_receives_what_its_plan_says(deployment, tmp_path):
    said = traffic_of(deployment.plan)
    sent, received = carried(deployment, tmp_path)
    assert sent == said.client.sent + said.joining.sent
    assert received == said.client.received + said.joining.received


def test_the_default_job_takes_39_kb_down_and_6_kb_up():
    """As README.md says, for an ordinary client and a member of the committee."""
    said = traffic_of(calibrate(JOB))
    assert said.client.sent + said.joining.sent == 6_092
    assert said.client.received + said.joining.received == 39_351
    assert (said.member.sent, said.member.received) == (8_492, 413_404)
