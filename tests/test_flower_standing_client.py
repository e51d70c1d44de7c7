"""A silo's half of standing keys over a transport that is one function call: what it refuses, and what it logs."""

import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

from d2pfed.deploy.account import ClientAccount, ClientSpending
from d2pfed.deploy.config import read_client_config
from d2pfed.deploy.layout import encode_task
from d2pfed.deploy.requests import HAS_KEYS, HAS_NO_KEYS, RequestKind
from d2pfed.deploy.rosters import Positions
from d2pfed.errors import ConfigError, PeerError
from d2pfed.ledger.client_log import Entry
from d2pfed.numerics.model_bytes import encode_model
from d2pfed.round import Attempt, StandingRun, epoch_of
from d2pfed.secagg.roster import sign_position
from d2pfed.secagg.standing import epoch as epochs
from support.enrolled_clients import DIMENSION, directory_of, enrol, make_plan, sign_roster
from support.malicious_server import LAYOUT, MaliciousServer

SILOS = 5
MODEL = encode_model(np.zeros(DIMENSION, np.float32))


@dataclass
class StandingServer(MaliciousServer):
    """The same server, with standing keys."""

    def __post_init__(self):
        self.standing = StandingRun(
            plan=self.plan,
            run=self.run,
            roster=self.roster.roster,
            silos=self.roster.roster.clients,
            exchange=self.exchange,
            presence=lambda asked, epoch: {each: self.has_keys(each, epoch) for each in asked},
        )

    def has_keys(self, client, epoch):
        return self.ask(client, RequestKind.PRESENCE, epoch) == HAS_KEYS

    def step(self, number=0, attempt=0):
        """A whole attempt; the sum of all silos comes back."""
        at = Attempt(self.run, number, attempt)
        step = self.standing.step(at, self.standing.members(at))
        task = encode_task(LAYOUT, {"server-round": number + 1})
        return step, self.standing.collect(step, MODEL, task)

    def invite(self, client=0, silos=None, **changes):
        """The answer to an invitation to an epoch between these silos."""
        silos = tuple(range(SILOS)) if silos is None else silos
        epoch = epoch_of(self.plan, self.run, self.roster.roster, silos, **({"epoch": 9, "first": 0} | changes))
        frame = epochs.encode_invitation(
            epoch, epoch.rank(client), self.roster.roster.serial, self.remembered.get(client)
        )
        return self.ask_frame(client, frame)


def config_of(server, client=0):
    return read_client_config(directory_of(server.directory, client))


def rows(server, client=0):
    return [row.entry for row in config_of(server, client).log.read().rows]


def change_settings(server, client, before, after):
    file = directory_of(server.directory, client) / "client.toml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


@pytest.fixture
def server(tmp_path):
    roster = enrol(tmp_path, SILOS, None)
    for client in range(SILOS):
        file = directory_of(tmp_path, client) / "client.toml"
        file.write_text(f'state = "{tmp_path}/keys"\nkeys_on_disk = true\n{file.read_text()}')
    made = StandingServer(tmp_path, make_plan(SILOS, rounds=4), roster)
    made.announce()
    return made


def test_a_step_charges_every_silo_once_under_its_own_number(server):
    for number in range(2):
        server.step(number)
    for client in range(SILOS):
        assert rows(server, client).count(Entry.CHARGE) == 2
        releases = ClientSpending.of(config_of(server, client).log.read()).releases
        assert [(each.run, each.round, each.attempt) for each in releases] == [
            (server.run, 0, 0),
            (server.run, 1, 0),
        ]


def test_an_epoch_with_fewer_silos_than_a_client_wants_is_refused(server):
    change_settings(server, 0, "least_cohort = 3", "least_cohort = 4")
    with pytest.raises(PeerError, match="an epoch must have at least 4 silos, got 3"):
        server.invite(silos=(0, 1, 2))
    assert Entry.BEGUN not in rows(server)
    assert server.invite(silos=(0, 1, 2, 3))


def test_a_policy_that_its_owner_has_changed_since_is_asked_again(server):
    change_settings(server, 0, "most_epsilon = 1000000.0", "most_epsilon = 1.0")
    with pytest.raises(ConfigError, match="this client's policy: epsilon against server must be at most 1"):
        server.invite()
    assert Entry.BEGUN not in rows(server)


def test_a_run_of_another_roster_is_not_gone_on_with(server):
    later = sign_roster(server.directory, {}, server.roster.roster, None)
    replace(server, run="a later run", roster=later).announce(0)
    for roster in (server.roster, later):
        with pytest.raises(PeerError, match="a run was announced under another roster"):
            replace(server, roster=roster).invite()


def test_an_invitation_for_another_silo_is_refused(server):
    epoch = epoch_of(server.plan, server.run, server.roster.roster, tuple(range(SILOS)))
    frame = epochs.encode_invitation(epoch, 1, server.roster.roster.serial, None)
    with pytest.raises(PeerError, match="this is client 0, the invitation is for client 1"):
        server.ask_frame(0, frame)


def test_an_unplanned_epoch_begins_nothing(server):
    before = config_of(server).log.read()
    with pytest.raises(PeerError, match="was agreed on with another plan or roster"):
        replace(server, plan=make_plan(SILOS, rounds=5)).invite()
    with pytest.raises(PeerError, match="an epoch has at most the planned 5 silos, got 6"):
        server.invite(silos=tuple(range(6)))
    assert config_of(server).log.read() == before


@pytest.mark.parametrize("first", [0, 1])
def test_an_epoch_that_begins_at_a_charged_step_is_refused(server, first):
    for number in range(2):
        server.step(0, number)  # steps 0 and 1 of the run
    before = config_of(server).log.read()
    with pytest.raises(PeerError, match="an epoch must begin after step 1, which was charged"):
        server.invite(first=first)
    assert config_of(server).log.read() == before
    assert server.invite(first=2)


def test_a_charged_step_is_not_computed_again_with_restored_keys(server):
    """A copy of the keys from before the step: the log still says what they were used for."""
    at = Attempt(server.run, 0, 0)
    step = server.standing.step(at, server.standing.members(at))
    shutil.copytree(server.directory / "keys", server.directory / "copy")
    server.standing.collect(step, MODEL, encode_task(LAYOUT, {"server-round": 1}))
    shutil.rmtree(server.directory / "keys")
    shutil.copytree(server.directory / "copy", server.directory / "keys")
    other = epochs.Request(step, encode_task(LAYOUT, {"server-round": 2}), MODEL)
    with pytest.raises(PeerError, match="step 0 was charged before"):
        server.ask_frame(0, epochs.encode_request(step.epoch, 0, other))
    assert rows(server).count(Entry.CHARGE) == 1


def test_a_new_epoch_erases_the_keys_of_the_one_before(server):
    step, _ = server.step()
    assert server.has_keys(0, step.epoch.digest)
    server.invite(first=1)
    assert server.ask(0, RequestKind.PRESENCE, step.epoch.digest) == HAS_NO_KEYS


def test_at_its_cap_a_silo_begins_nothing_and_says_nothing(server):
    step, _ = server.step()
    config = config_of(server)
    account, note = ClientAccount(config.log, config.budget), {"session": "", "roster": "", "draw": 0}
    for number in range(1, server.plan.max_participations):
        account.charge(server.plan, server.run, 9, number, note)
    before = config.log.read()
    with pytest.raises(ConfigError, match=f"has sent {server.plan.max_participations} vectors in run"):
        server.invite(first=7)
    with pytest.raises(PeerError, match="cap or budget is reached"):
        server.has_keys(0, step.epoch.digest)
    assert config.log.read() == before


def test_a_silo_remembers_where_it_has_met_the_others(server):
    server.step()
    config = config_of(server)
    met = Positions(config.directory / "peers", server.roster.roster.keys).latest()
    assert sorted(met) == [1, 2, 3, 4]
    for client, position in met.items():  # at the row that says that the epoch has begun
        begun = [row.head.seq for row in config_of(server, client).log.read().rows if row.entry is Entry.BEGUN]
        assert [position.count] == begun


def test_a_silo_met_beyond_its_log_refuses_everything(server):
    config = config_of(server)
    server.remembered[0] = sign_position(config.secret, server.roster.roster.authority, 0, 7, bytes(32))
    with pytest.raises(PeerError, match="was rolled back or cloned"):
        server.invite()
    server.remembered.clear()
    for ask in (server.invite, lambda: server.announce(0)):  # whoever asks, whatever for
        with pytest.raises(PeerError, match="this client failed; its own log says why"):
            ask()
    assert (config.anchor / "mark").exists()
