"""The durable record of releases: a row before anything can be unmasked, and a budget that is never overrun."""

from d2pfed.ledger.budget import Budget, ChargedRun, RunPlan
from d2pfed.ledger.ledger import Ledger, Verification, read_budget, read_rows, verify
from d2pfed.ledger.rows import Head, Key, Row, RowKind, decode_release, encode_release
