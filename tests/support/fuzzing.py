"""What a fuzzer is let loose on: every reader of bytes from elsewhere, and the machines of both protocols.

A target takes bytes; it returns, or refuses them with an error of ours. Anything else is a finding.
"""

import copy
import copyreg
import io
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from unittest.mock import patch

import numpy as np

from d2pfed import certificate_verifier
from d2pfed.accounting import SERVER
from d2pfed.cli.options import read_config
from d2pfed.deploy import config as client_config
from d2pfed.deploy import rosters as enrolment
from d2pfed.deploy.layout import Layout, decode_task, encode_task
from d2pfed.deploy.requests import ExchangeRequest, RunAcceptance, RunAnnouncement
from d2pfed.deploy.state import SavedPhase
from d2pfed.errors import D2PFedError, PeerError
from d2pfed.ledger import Budget, Head
from d2pfed.ledger.budget import ChargedRun, decode_body
from d2pfed.ledger.client_log import Anchor, Entry, LogRow, head_after, parse
from d2pfed.ledger.rows import decode_release, encode_release
from d2pfed.numerics import canonical
from d2pfed.numerics.model_bytes import decode_model, encode_model
from d2pfed.numerics.randomness import digest
from d2pfed.plan import PrivacyTarget, calibrate, decode_plan
from d2pfed.plan.target import parse_clip
from d2pfed.round import run_plan
from d2pfed.runs import json_files as plain
from d2pfed.runs.records import ExchangeRecord, RoundRecord
from d2pfed.secagg import standing
from d2pfed.secagg.roster import unpack_position
from d2pfed.secagg.shamir import unpack_share
from d2pfed.secagg.wire import HEADER_BYTES, frame, kind_of
from support.certificates import signed
from support.federation import MODEL, TASK, Federation, advertising_of, keep_all
from support.standing import SILOS, Silos, make_epoch
from test_secagg_damage import SAMPLES, SESSIONS, federation_of

PLAN = calibrate(
    PrivacyTarget(
        dimension=12,
        population=6,
        cohort_size=6,
        rounds=2,
        epsilon=8.0,
        delta=1e-3,
        against=SERVER,
        sampling="none",
    )
)
LAYOUT = Layout.of({"weight": np.zeros((2, 5), np.float32), "bias": np.zeros(2, np.float32)})
copyreg.pickle(MappingProxyType, lambda view: (MappingProxyType, (dict(view),)))  # type: ignore[arg-type]
copyreg.pickle(type(threading.Lock()), lambda _lock: (threading.Lock, ()))

CLIENT_TOML = 'client = 3\nconsistency = "assumed"\n[policy]\nleast_cohort = 5\n[budget]\nepsilon = 4.0\n'


@dataclass(frozen=True)
class Target:
    """One reader, with bytes that it accepts."""

    name: str
    run: Callable[[bytes], object]
    samples: tuple[bytes, ...]

    def refuses(self, data: bytes) -> bool:
        """Say whether bytes were refused; anything but an error of ours comes out as it is."""
        try:
            self.run(data)
        except D2PFedError:
            return True
        return False


def texts() -> Iterator[Target]:
    """Readers of texts: plans, the ledger's rows, logs, layouts, settings, records."""
    charge = run_plan(PLAN)
    release = charge.release

    def text(decode: Callable[[str], object]) -> Callable[[bytes], object]:
        return lambda data: decode(data.decode("utf-8", "replace"))

    run = ChargedRun("a run", "owner", charge)
    yield Target("plan", text(decode_plan), (canonical.encode(PLAN).encode(),))
    yield Target("release", text(decode_release), (encode_release(release).encode(),))
    yield Target("budget", text(partial(decode_body, kind=Budget)), (canonical.encode(charge.budget).encode(),))
    yield Target("charged run", text(partial(decode_body, kind=ChargedRun)), (canonical.encode(run).encode(),))
    yield Target("head", text(Head.decode), (Head(3, bytes(32)).encode().encode(),))
    yield Target("layout", text(Layout.decode), (LAYOUT.encode().encode(),))
    yield Target("draws", text(enrolment.DrawCommitment.decode), (f"3:{bytes(32).hex()}".encode(),))
    yield Target("used draws", enrolment._decode, (b'{"run": [0, 3]}',))
    yield Target("public key", text(enrolment.decode_public), (bytes(32).hex().encode(),))
    yield Target("clip", text(parse_clip), (b"auto", b"0.5"))
    yield Target("anchor", Anchor.decode, (Anchor(Head(3, bytes(32)), 1, "ab").encode(),))
    yield Target("client log", partial(parse, Head(0, bytes(32))), (client_log(),))
    yield Target(
        "round record", text(lambda line: plain.from_json(RoundRecord, line, "a line")), (ROUND.encode(),)
    )
    yield Target("client settings", settings_of, (CLIENT_TOML.encode(),))
    yield Target("options", options_of, (b'epsilon = 3.0\nclip = "auto"\n',))


ROUND = plain.to_json(
    RoundRecord(
        round=1,
        metrics={"loss": 1.0},
        charged=1,
        survivors=5,
        attempt=0,
        update_norm=0.5,
        clip=1.0,
        fraction_clipped=None,
        upload_bytes=12,
        seconds=0.5,
        exchanges=(ExchangeRecord("masks", 5, 5, 0.1, 10, 10),),
    )
)


def client_log() -> bytes:
    """A log of three rows."""
    head, lines = Head(0, bytes(32)), b""
    for number, entry in enumerate((Entry.DECLARATION, Entry.ROSTER, Entry.CHARGE), 1):
        body = {"time": number, "serial": number, "digest": "ab", "run": "run", "step": 0}
        text = json.dumps(body, sort_keys=True)
        head = head_after(head, number, entry, text)
        lines += LogRow(entry, body, text, head).line()
    return lines


def settings_of(data: bytes) -> object:
    """Read a client's settings."""
    with (
        patch.object(client_config, "read_file", lambda _file: data),
        patch.object(client_config, "require_directory", lambda _directory: None),
    ):
        return client_config.read_client_config(Path("client"))


def options_of(data: bytes) -> object:
    """Read a file of options as a command does."""
    params = [SimpleNamespace(name=name) for name in ("epsilon", "clip", "rounds")]
    context = SimpleNamespace(command=SimpleNamespace(params=params), default_map=None)
    no = lambda: False  # noqa: E731 - it is no device
    file = SimpleNamespace(read_bytes=lambda: data, is_char_device=no, is_block_device=no)
    return read_config(context, file)  # type: ignore[arg-type]


def wires() -> Iterator[Target]:
    """Readers of bytes: messages of both protocols, requests, saved phases."""
    for number, sample in enumerate(SAMPLES):
        yield Target(f"message {number} {sample.kind}", sample.decode, (sample.data,))  # type: ignore[arg-type]
    announced = RunAnnouncement("a run", canonical.encode(PLAN), LAYOUT.encode(), 0, b"roster")
    yield Target("announcement", RunAnnouncement.decode, (announced.encode(),))
    yield Target("acceptance", RunAcceptance.decode, (RunAcceptance(7, bytes(64)).encode(),))
    yield Target("exchange", ExchangeRequest.decode, (ExchangeRequest(b"frame", 5.0, 60.0).encode(),))
    task = encode_task(LAYOUT, {"lr": 0.1, "layers": [1, 2]})
    yield Target("task", lambda data: decode_task(data, LAYOUT), (task,))
    model = encode_model(np.zeros(LAYOUT.dimension, np.float32))
    yield Target("model", lambda data: decode_model(data, LAYOUT.dimension), (model,))
    saved = SavedPhase("run", b"invitation", 1.0, 9e9, b"state").encode()[32:]
    yield Target("saved phase", lambda data: SavedPhase.decode(digest("saved", data) + data), (saved,))
    yield Target("position", unpack_position, (bytes(range(104)),))
    yield Target("share", unpack_share, (bytes(33),))


def machines() -> Iterator[Target]:
    """Clients, servers and silos, each just before one message of each phase."""
    for number, session in enumerate(SESSIONS):
        yield from _clients(f"client {number}", federation_of(session))
        yield from _servers(f"server {number}", federation_of(session))
    yield from _silos()


def _clients(name: str, federation: Federation) -> Iterator[Target]:
    session = federation.session
    victim = session.cohort[1]
    seen: list[tuple[bytes, bytes]] = []
    kept = federation.clients[victim]

    class Recorder:
        def receive(self, request: bytes) -> bytes:
            nonlocal kept
            saved = kept.save()
            seen.append((saved, request))
            kept = federation.restore(victim, saved)
            return kept.receive(request)

    federation.clients[victim] = Recorder()  # type: ignore[assignment]
    list(_phases(federation, victim))
    for phase, (saved, request) in enumerate(seen):

        def receive(data: bytes, saved: bytes = saved) -> bytes:
            return federation.restore(victim, saved).receive(data)

        yield Target(f"{name} phase {phase}", receive, (request,))


def _phases(federation: Federation, victim: int) -> Iterator[tuple[object, bytes, tuple[object, ...]]]:
    """Yield each phase of a server with all answers but the victim's, and that answer."""
    phase: object = advertising_of(federation)
    for name, arguments in (
        ("advertise", ()),
        ("share", (TASK, MODEL)),
        ("mask", ()),
        ("confirm", ()),
        ("unmask", ()),
    ):
        answers = dict(federation.exchange(name, keep_all)(phase.outbox))  # type: ignore[attr-defined]
        own = answers.pop(victim, None)
        for client, answer in answers.items():
            phase.receive(client, answer)  # type: ignore[attr-defined]
        if own is not None:
            yield phase, own, arguments
            phase.receive(victim, own)  # type: ignore[attr-defined]
        phase = phase.close(*arguments)  # type: ignore[attr-defined]


def _servers(name: str, federation: Federation) -> Iterator[Target]:
    victim = federation.session.cohort[1]
    for number, (phase, own, arguments) in enumerate(_phases(federation, victim)):
        yield Target(f"{name} phase {number}", _then_close(copy.deepcopy(phase), victim, arguments), (own,))


def _then_close(phase: object, victim: int, arguments: tuple[object, ...] = ()) -> Callable[[bytes], object]:
    """A server's phase: it takes one more answer, and what it accepted it can go on with, or the attempt is void."""

    def receive(data: bytes) -> object:
        fresh = copy.deepcopy(phase)
        fresh.receive(victim, data)  # type: ignore[attr-defined]
        return fresh.close(*arguments)  # type: ignore[attr-defined]

    return receive


def _silos() -> Iterator[Target]:
    silos, victim = Silos(make_epoch()), SILOS[1]
    own = silos.by_client[victim]
    asked: dict[str, tuple[object, bytes]] = {}
    answered: dict[str, tuple[object, bytes]] = {}

    def watched(name: str, phase: object) -> None:
        silo = copy.deepcopy(own)
        outbox = phase.outbox  # type: ignore[attr-defined]
        asked[name] = silo, outbox[victim]
        answers = dict(silos.exchange(name)(outbox))
        for client, answer in answers.items():
            if client != victim:
                phase.receive(client, answer)  # type: ignore[attr-defined]
        answered[name] = copy.deepcopy(phase), answers[victim]
        phase.receive(victim, answers[victim])  # type: ignore[attr-defined]

    advertising = standing.Advertising(silos.epoch, silos.roster)
    watched("invite", advertising)
    agreeing = advertising.close()
    watched("agree", agreeing)
    silos.current = agreeing.close()
    collecting = standing.Collecting(silos.current.keys, silos.current.step(0, 0, SILOS), TASK, MODEL)
    watched("answer", collecting)
    collecting.close()
    for name, (silo, request) in asked.items():

        def receive(data: bytes, name: str = name, silo: object = silo) -> object:
            fresh = copy.deepcopy(silo)
            return fresh.invite(silos.epoch, data) if name == "invite" else getattr(fresh, name)(data)

        yield Target(f"silo {name}", receive, (request,))
    for name, (phase, answer) in answered.items():
        yield Target(f"standing server {name}", _then_close(phase, victim), (answer,))


def certificates() -> Iterator[Target]:
    """The verifier, on a file as it is and on statements that a forger has signed anew."""
    from d2pfed.api.certify import certify  # noqa: PLC0415 - only here
    from support.certificates import key_in, statistics  # noqa: PLC0415 - the same

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        whole = certify(statistics(root / "ledger", 2), key=key_in(root)).certificate.read_bytes()

    def verify(data: bytes) -> object:
        path = SimpleNamespace(open=lambda _mode: io.BytesIO(data))
        try:
            return certificate_verifier.verify(path)  # type: ignore[arg-type]
        except ValueError as error:
            raise PeerError(str(error)) from None  # as its command does: one line, status 2

    def forged(data: bytes) -> object:
        try:
            statement = json.loads(data)
            return verify(signed(statement))
        except (ValueError, RecursionError):
            return verify(data)

    statement = json.dumps(json.loads(whole)["statement"]).encode()
    yield Target("certificate", verify, (whole,))
    yield Target("signed statement", forged, (statement,))


GROUPS: dict[str, Callable[[], Iterator[Target]]] = {
    "texts": texts,
    "wires": wires,
    "machines": machines,
    "certificates": certificates,
}


def reframed(original: bytes, body: bytes) -> bytes:
    """A message with another body and the right checksum, as a liar sends it."""
    party = int.from_bytes(original[8:16], "little")
    return frame(kind_of(original), original[24:56], party, body)


def is_framed(data: bytes) -> bool:
    """Say whether bytes are a message of the protocols."""
    return len(data) > HEADER_BYTES and data[:4] == SAMPLES[0].data[:4]
