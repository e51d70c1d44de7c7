"""A signed statement of what a run or a ledger guarantees, bound to the ledger's chain."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from d2pfed.api.certificate_content import (
    Json,
    LedgerRecord,
    allowed,
    event,
    ledger_facts,
    run_facts,
    statement,
)
from d2pfed.api.certificate_page import page, registry_entry
from d2pfed.certificate_verifier import Wrong, canonical
from d2pfed.deploy.config import default_signing_key, make_secret, read_secret
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.ledger import Head
from d2pfed.ledger.files import make_directory, replace_file
from d2pfed.runs.plain import read_text
from d2pfed.runs.report import read_report
from d2pfed.secagg.crypto import sign, signing_public

_OWNER_BYTES = 8  # of a run's identity, by which its ledger knows its directory
_MODE = 0o666  # as the umask allows: a certificate is for others to read


@dataclass(frozen=True, slots=True)
class Certified:
    """Where a certificate is, and who signed it."""

    certificate: Path
    page: Path
    registry: Path
    public_key: str
    key: Path
    key_is_new: bool


def certify(
    run: Path, *, ledger: Path | None = None, key: Path | None = None, output: Path | None = None
) -> Certified:
    """Write certificate.json, signed, with certificate.html and registry.yaml beside it.

    Args:
        run: a run's directory, or a ledger.
        ledger: the ledger that the run shares with others; None: its own.
        key: the file of the private Ed25519 key, 32 bytes; None: this user's. Made if there is none.
        output: the directory to write to; None: the run's, or the ledger's.

    Guarantee: what is stated is checked from the ledger's rows first; nothing of it tells who took part in an attempt.
    Checked: test_certify.py.
    """
    content = stated(run, ledger)
    file = default_signing_key() if key is None else key
    is_new = not (file.exists() or file.is_symlink())
    if is_new:
        if key is None:
            make_directory(file.parent)
        make_secret(file)
    secret = read_secret(file)
    public = signing_public(secret).hex()
    signed = canonical(
        {"statement": content, "public_key": public, "signature": sign(secret, canonical(content)).hex()}
    )
    directory = output or (run if run.is_dir() else run.parent)
    shown = {"certificate.html": page(content, signed, public), "registry.yaml": registry_entry(content)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in shown.items():
            replace_file(directory / name, text.encode(), mode=_MODE)
        replace_file(directory / "certificate.json", signed, mode=_MODE)  # last: what it is shown by is there
    except OSError as error:
        raise ConfigError(f"cannot write the certificate in {directory}: {error.strerror}") from error
    return Certified(
        certificate=directory / "certificate.json",
        page=directory / "certificate.html",
        registry=directory / "registry.yaml",
        public_key=public,
        key=file,
        key_is_new=is_new,
    )


def stated(run: Path, ledger: Path | None) -> Json:
    """Return what a certificate of a run or a ledger states."""
    issued = datetime.now(UTC).date().isoformat()
    if run.is_file():
        record = LedgerRecord.read(run)
        return statement(None, None, record, facts=ledger_facts(run, record), issued=issued)
    report = read_report(run)
    if report.plan is None:
        raise ConfigError(f"the run in {run} was trained in the clear: there is nothing to certify")
    if ledger is None and report.ledger is None:
        raise ConfigError(f"the run in {run} has drawn on another ledger: name it with --ledger")
    record = LedgerRecord.read(run / "ledger.sqlite" if ledger is None else ledger)
    try:
        owner = (run / "identity").read_bytes()[:_OWNER_BYTES].hex()
        record.require_head(Head.decode(read_text(run / "seen")), f"the run in {run}")
    except (OSError, LedgerError) as error:
        raise ConfigError(f"the run in {run} has not begun, or its directory is damaged: {error}") from error
    own = next((begun for _, begun in record.runs if begun.owner == owner), None)
    if own is None or own.plan.plan != report.plan.digest:
        raise ConfigError(f"the ledger has charged no run of {run} with its plan: there is nothing to certify")
    return statement(report, own, record, facts=run_facts(run, report, report.plan, own), issued=issued)


def check_ledger(content: Json, ledger: Path) -> str:
    """Compare events and budget of a certificate with a ledger, all of whose rows are checked; raises `Wrong`."""
    claimed = content["ledger"] if isinstance(content["ledger"], dict) else {}
    try:
        head = Head.decode(str(claimed["head"]))
        record = LedgerRecord.read(ledger)
        record.require_head(head, "the certificate")
    except (ConfigError, LedgerError, KeyError) as error:
        raise Wrong(str(error)) from error
    found = [event(own, begun) for own, begun in record.runs if own.seq <= head.seq]
    if content["events"] != found:
        raise Wrong(
            f"up to row {head.seq} it has charged other runs than the certificate states, or left some out"
        )
    if claimed.get("budget") != (budget := allowed(record.found.budget)):
        raise Wrong(f"it allows {budget}, and the certificate states {str(claimed.get('budget'))[:200]}")
    return f"its chain of {head.seq + 1} rows leads to the certificate's head, and its charged runs are the events"
