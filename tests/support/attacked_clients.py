"""Rosters of clients whose keys a server knows, but for one real victim; and the lives of real clients."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from d2pfed.accounting import CohortSampling, Sampling
from d2pfed.deploy.client import PrivateClient, Purpose, TrainArrays
from d2pfed.deploy.config import ClientConfig, init_client, make_secret, read_client_config
from d2pfed.deploy.requests import ExchangeRequest, RequestKind, RunAnnouncement
from d2pfed.deploy.rosters import Draws, SignedRoster, make_draws
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import ClientHistory
from d2pfed.ledger.files import create_file, make_directory
from d2pfed.numerics.randomness import Stream
from d2pfed.secagg import Roster
from d2pfed.secagg.crypto import signing_public
from d2pfed.secagg.draws import Opening, draw_key
from d2pfed.secagg.wire import MessageKind, kind_of
from support.enrolled_clients import anchor_in, directory_of, sign_roster, write_settings
from support.federation import enrolment_secret
from support.rosters import draw_cohort

Settings = Mapping[str, object]


@dataclass(frozen=True)
class Group:
    """A roster with its draws; who would collude, and in which order, was settled before the authority's nonce."""

    home: Path
    signed: SignedRoster
    authority: bytes
    victim: int
    witness: int
    others: tuple[int, ...]  # in the order in which they are bribed; the witness last
    _worst: dict[object, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def roster(self) -> Roster:
        return self.signed.roster

    @cached_property
    def openings(self) -> list[Opening]:
        depth = self.roster.depth
        if depth is None:
            return []
        tree = Draws(self.home / "draws", self.roster).tree
        return [tree.open(draw) for draw in range(1 << depth)]

    def drawn(self, sampling: CohortSampling, draw: int, block: int) -> tuple[int, ...]:
        key = draw_key(self.roster.digest, draw, self.openings[draw].seed)
        return draw_cohort(key, self.roster.clients, sampling, block)

    def worst_draws(self, sampling: CohortSampling, colluders: frozenset[int]) -> list[tuple[int, int]]:
        """The draws and blocks with the victim in their cohort, those with most colluders first."""
        if (found := self._worst.get((sampling, colluders))) is not None:
            return found
        blocks = sampling.population // sampling.cohort_size if sampling.method is Sampling.ONCE else 1
        places = [(draw, block) for draw in range(len(self.openings)) for block in range(blocks)]
        cohorts = {place: self.drawn(sampling, *place) for place in places}
        joined = [place for place in places if self.victim in cohorts[place]]
        joined.sort(key=lambda place: -len(colluders.intersection(cohorts[place])))
        self._worst[sampling, colluders] = joined
        return joined


def make_group(home: Path, size: int, depth: int | None, stream: Stream) -> Group:
    """Enrol two real clients and others whose keys the server knows."""
    home.mkdir()
    authority = make_secret(home / "authority.key")
    identities = [int(each) for each in stream.subset(5 * size, size)]
    shuffled = [identities.pop(stream.below(len(identities))) for _ in range(size)]
    victim, witness, *bribed = shuffled
    known = {client: signing_public(enrolment_secret(client)) for client in bribed}
    make_directory(directory_of(home, witness))
    create_file(directory_of(home, witness) / "key", enrolment_secret(witness))  # where it is a peer as well
    for client in (victim, witness):
        known[client] = init_client(directory_of(home, client), client, authority, anchor_in(home, client))
    committed = None if depth is None else make_draws(home / "draws", depth)
    signed = sign_roster(home, known, None, committed)
    return Group(home, signed, authority, victim, witness, (*bribed, witness))


@dataclass
class Life:
    """One life of a real client: a copy of its directory, its data, and all that a server sees of it."""

    group: Group
    client: int
    home: Path
    train: TrainArrays
    seen: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)  # that it was sent
    vectors: int = 0  # that it has sent

    @staticmethod
    def begin(group: Group, client: int, home: Path, settings: Settings, train: TrainArrays) -> "Life":
        for place in (directory_of, anchor_in):
            shutil.copytree(place(group.home, client), place(home, client))
        write_settings(home, client, group.authority, settings)
        file = directory_of(home, client) / "client.toml"
        file.write_text(f'state = "{home}/keys-{client}"\nkeys_on_disk = true\n{file.read_text()}')
        return Life(group, client, home, train)

    def announce(self, announcement: RunAnnouncement) -> None:
        self._ask(RequestKind.ANNOUNCEMENT, announcement.encode(), Purpose.TRAINING)

    def receive(self, frame: bytes, purpose: Purpose = Purpose.TRAINING) -> bytes:
        """The answer to one frame; a refusal is a PeerError, and so is what must never come out."""
        self.frames.append(frame)
        answer = self._ask(RequestKind.EXCHANGE, ExchangeRequest(frame, 60.0, 300.0).encode(), purpose)
        self.vectors += kind_of(answer) in (MessageKind.MASKED_VECTOR, MessageKind.STANDING_MASKED)
        return answer

    def _ask(self, kind: RequestKind, data: bytes, purpose: Purpose) -> bytes:
        try:
            answer = PrivateClient(self.config, 7, {}, self.train, purpose).answer(kind, data)
        except (PeerError, ConfigError) as error:
            self.refusals.append(str(error))
            self.seen.append(f"refused: {error}")
            raise PeerError(str(error)) from None
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            self.seen.append(f"ESCAPED: {error!r}")
            raise PeerError("escaped") from None
        self.seen.append(f"{len(answer)} bytes" if kind is not RequestKind.EXCHANGE else _shape(answer))
        return answer

    @cached_property
    def config(self) -> ClientConfig:
        return read_client_config(directory_of(self.home, self.client))

    def history(self) -> ClientHistory:
        return self.config.log.read()


def _shape(answer: bytes) -> str:
    return f"{MessageKind(kind_of(answer)).name} of {len(answer)} bytes"
