"""The neighbouring relations of clients: all but add-remove, which is of records."""

from d2pfed.accounting import Adjacency

OF_CLIENTS = (Adjacency.REPLACE_ONE, Adjacency.ZERO_OUT)
