"""Messages of one field, read as the other side reads them."""

from d2pfed.secagg import checks
from d2pfed.secagg.crypto import SIGNATURE_BYTES
from d2pfed.secagg.pairwise.keys import read_advertisement
from d2pfed.secagg.standing.epoch import read_advert
from d2pfed.secagg.wire import CONTEXT_BYTES, MessageKind, opened


def decode_advertisement(session, rank, data):
    with opened(session, MessageKind.KEY_ADVERTISEMENT, rank, data) as reader:
        return read_advertisement(session, reader)


def decode_survivors(session, kind, rank, data):
    with opened(session, kind, rank, data) as reader:
        return reader.subset(len(session.cohort))


def decode_confirmation(session, rank, data):
    with opened(session, MessageKind.SURVIVORS_SIGNATURE, rank, data) as reader:
        return reader.take(SIGNATURE_BYTES)


def decode_advert(epoch, rank, data):
    with opened(epoch, MessageKind.STANDING_ADVERT, rank, data) as reader:
        return read_advert(reader)


def decode_masked(epoch, rank, context, data):
    with opened(epoch, MessageKind.STANDING_MASKED, rank, data) as reader:
        checks.require_context(reader.take(CONTEXT_BYTES), context)
        return reader.vector(epoch.ring, epoch.dimension)
