"""One message per client: vectors behind learning with errors, opened by a committee."""

from d2pfed.secagg.lattice.checks import require_one_statement
from d2pfed.secagg.lattice.client import Contribute, Member, Participant, Record
from d2pfed.secagg.lattice.messages import decode_request
from d2pfed.secagg.lattice.server import Agreeing, Convening, Invitations, Opening, Tracing
from d2pfed.secagg.lattice.session import Session, model_digest
