"""The exceptions raised on purpose; any other one is a bug of ours."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class D2PFedError(Exception):
    """Base of every error that d2pfed raises on purpose; its text is one line, whatever a value in it looks like."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class ConfigError(D2PFedError, ValueError):
    """A setting or an input cannot be used: the text names the rule and the value that breaks it.

    Examples:
        >>> PrivacyTarget(epsilon=-1.0)
        Traceback (most recent call last):
        d2pfed.errors.ConfigError: epsilon must be positive and finite, got -1.0
    """


class DamagedFile(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """A file does not hold what was written to it, or what its kind must hold: the text names file and finding."""


class DownloadError(D2PFedError):
    """A file could not be downloaded, or is not the one that was expected."""


class MissingExtra(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """A package is not installed that an optional part of d2pfed needs: the text says what to install."""


class PeerError(D2PFedError):
    """A message from the other side broke the protocol."""


class RolledBack(PeerError):  # noqa: N818 - the name of the event, not of a defect
    """A peer or the server has seen this client at a position that its log does not have: it must not go on."""

    def __init__(self, text: str, count: int, head: bytes) -> None:
        super().__init__(text)
        self.count = count
        self.head = head


class TooFewClients(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """Too few clients are left, these ones: the attempt is void. Those to blame, if any, are not asked again.

    Those suspected may be honest: they are left out of the next attempt, and of no other.
    """

    def __init__(
        self,
        text: str,
        left: tuple[int, ...] = (),
        blamed: tuple[int, ...] = (),
        suspected: tuple[int, ...] = (),
    ) -> None:
        super().__init__(text)
        self.left = left
        self.blamed = blamed
        self.suspected = suspected


class VoidStep(TooFewClients):
    """A member's vector is missing in a step with standing keys: nothing opens, and the step stays charged."""


class ForgottenAttempt(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """Clients have begun an attempt that the ledger does not know: these ones may be in its sum."""

    def __init__(self, text: str, attempt: int, cohort: tuple[int, ...]) -> None:
        super().__init__(text)
        self.attempt = attempt
        self.cohort = cohort


class LostRound(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """Clients have gone beyond a round whose sum is not known here: it is charged, and the model does not move."""


class BudgetExceeded(D2PFedError):  # noqa: N818 - the name of the event, not of a defect
    """A release was refused because it would spend more than the budget."""


class LedgerError(D2PFedError):
    """The ledger cannot be read or written, or its content is inconsistent: nothing may be released."""


def shown(number: int) -> str:
    """Return a whole number as an error shows it; one that nobody would read, and Python may not print, by its size."""
    return str(number) if abs(number) < 10**20 else f"a number of {number.bit_length()} bits"


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name that was most likely meant, or none: one that begins alike, or is spelt nearly so."""
    ranked = sorted(known, key=lambda each: (not each.startswith(name), len(each)))
    return [each for each in ranked[:1] if name and each.startswith(name)] or get_close_matches(name, ranked, 1)


@contextmanager
def needs_extra(extra: str, *packages: str) -> Iterator[None]:
    """Turn a failed import of one of these packages into the error that says which extra to install.

    Any other failed import is left as it is: it is a defect, not a missing extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        raise MissingExtra(f"{package} is not installed; run: pip install 'd2pfed[{extra}]'") from None
