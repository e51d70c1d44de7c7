"""One finding: what is claimed, where, what is true, how that is shown, and what to do instead."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One erratum; `truth` holds computed numbers only, `how` says by what, and what was read elsewhere."""

    topic: str
    claim: str
    where: str
    truth: str
    how: str
    remedy: str

    def row(self) -> tuple[str, ...]:
        """Return the cells under `COLUMNS`."""
        return self.topic, self.claim, self.where, self.truth, self.how, self.remedy


COLUMNS = ("topic", "claim", "where", "truth", "demonstration", "remedy")
