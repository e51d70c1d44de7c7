"""The limits of what a client insists on, at the limit and one beside it."""

import pytest

from d2pfed.errors import PeerError
from d2pfed.secagg import checks


def test_one_client_fewer_than_the_quorum_is_refused():
    checks.require_quorum(7, 7)
    with pytest.raises(PeerError, match="at least 7 clients must be left, got 6"):
        checks.require_quorum(7, 6)
