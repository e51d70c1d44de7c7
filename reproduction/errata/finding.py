"""One finding: what is claimed, where, what is true, and how that is known."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row of the errata; `truth` holds computed numbers only, `how` says by what, and what was read elsewhere."""

    topic: str
    claim: str
    where: str
    truth: str
    how: str

    def row(self) -> tuple[str, ...]:
        """Return the cells under `COLUMNS`."""
        return self.topic, self.claim, self.where, self.truth, self.how


COLUMNS = ("topic", "claim", "where", "truth", "how")
