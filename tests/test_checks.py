"""The limits of what a client insists on, at the limit and one beside it."""

import pytest

from d2pfed.errors import PeerError
from d2pfed.secagg.pairwise import checks
from d2pfed.secagg.wire import subset_of
from support.federation import make_session


def test_one_client_fewer_than_the_quorum_is_refused():
    session = make_session(9, quorum=7)
    checks.require_quorum(session, subset_of(9, range(7)))
    with pytest.raises(PeerError, match="at least 7 clients must be left, got 6"):
        checks.require_quorum(session, subset_of(9, range(6)))
