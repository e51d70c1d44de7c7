"""A rehearsal is the whole signed protocol, and a defect in it is found before a run begins."""

import numpy as np
import pytest

from d2pfed.errors import D2PFedError
from d2pfed.numerics.randomness import Entropy
from d2pfed.secagg import Client
from d2pfed.simulation.rehearsal import LOST, REHEARSING, rehearse


@pytest.mark.parametrize("bits", [8, 11, 20])
def test_a_rehearsal_loses_some_clients_and_adds_up_the_rest(bits):
    assert rehearse(100, bits, Entropy.replay(b"rehearsal")) == REHEARSING - LOST


def test_a_client_that_sends_another_vector_is_noticed(monkeypatch):
    made = Client.__init__

    def spoiled(self, session, client, contribute, *rest):
        def other(*given):
            vector = contribute(*given)
            return np.roll(vector, 1) if client == REHEARSING - 1 else vector

        made(self, session, client, other, *rest)

    monkeypatch.setattr(Client, "__init__", spoiled)
    with pytest.raises(D2PFedError, match="wrong sum"):
        rehearse(50, 8, Entropy.replay(b"rehearsal"))
