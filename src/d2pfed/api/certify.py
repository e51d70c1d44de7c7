"""A signed statement of what a run or a ledger guarantees, bound to the ledger's chain, and its page for people."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from d2pfed.accounting import round_up
from d2pfed.api.certificate_content import Json, LedgerRecord, allowed, event, ledger_facts, run_facts, statement
from d2pfed.certificate_verifier import Wrong, canonical
from d2pfed.deploy.config import default_signing_key, make_secret, read_secret
from d2pfed.errors import ConfigError, LedgerError
from d2pfed.fields import check_arguments
from d2pfed.ledger import Head
from d2pfed.ledger.files import make_directory, replace_file
from d2pfed.runs.json_files import read_text
from d2pfed.runs.report import read_report
from d2pfed.secagg.crypto import sign, signing_public

_OWNER_BYTES = 8  # of a run's identity, by which its ledger knows its directory
_MODE = 0o666  # as the umask allows: a certificate is for others to read
_TO_FILL = "to be filled in by the data curator"
_OBSERVED = {
    "released": "anyone who sees the released models and not who took part",
    "server": "the server, which knows every sum and every cohort",
    "client": "another client of a cohort",
    "colluding": "the server together with that many clients of a cohort",
    "alone": "the server together with all other clients",
}
_SCOPES = {"run": "this run", "composed": "the runs so far", "budget": "all runs of the ledger"}
_SECTIONS = (
    *("subject", "released", "unit", "adjacency", "mechanism", "sampling", "participations", "colluders"),
    *("dropouts", "tuning", "trust_model", "evaluation", "software"),
)


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
    run: Path | str,
    *,
    ledger: Path | str | None = None,
    key: Path | str | None = None,
    output: Path | str | None = None,
) -> Certified:
    """Write certificate.json, signed, with certificate.html and registry.yaml beside it.

    Args:
        run: a run's directory, or a ledger.
        ledger: the ledger that the run shares with others; None: its own.
        key: the file of the private Ed25519 key, 32 bytes; None: this user's. Made if there is none.
        output: the directory to write to; None: the run's, or the ledger's.

    Returns:
        Where the three files and the key are.

    Guarantee: what is stated is checked from the ledger's rows first; nothing of it tells who took part in an attempt.
    Checked: test_certify.py.

    Examples:
        >>> result = fit("logistic", "digits", population=60, rounds=2, cohort_size=20, privacy={"epsilon": 50.0})
        >>> certify(result.directory, key="signer.key").certificate.name
        'certificate.json'
    """
    check_arguments(certify, locals())
    run = Path(run)
    content = stated(run, None if ledger is None else Path(ledger))
    file = default_signing_key() if key is None else Path(key)
    is_new = not (file.exists() or file.is_symlink())
    if is_new:
        if key is None:
            make_directory(file.parent)
        make_secret(file)
    secret = read_secret(file)
    public = signing_public(secret).hex()
    signature = sign(secret, canonical(content)).hex()
    signed = canonical({"statement": content, "public_key": public, "signature": signature})
    directory = (run if run.is_dir() else run.parent) if output is None else Path(output)
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
        raise ConfigError(f"the run in {run} was trained without privacy: there is nothing to certify")
    if ledger is None and report.ledger is None:
        raise ConfigError(f"the run in {run} used another ledger: name it with --ledger")
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
        raise Wrong(f"up to row {head.seq} it has charged other runs than the certificate states, or left one out")
    if claimed.get("budget") != (budget := allowed(record.found.budget)):
        raise Wrong(f"it allows {budget}, but the certificate states {str(claimed.get('budget'))[:200]}")
    return f"its chain of {head.seq + 1} rows leads to the certificate's head, and its charged runs are the events"


def page(content: dict[str, Any], signed: bytes, public: str) -> str:
    """Return the page of a certificate; equal certificates give equal pages."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("certificate.html.j2").read_text("utf-8"))
    began = {"runs began with": sorted({each["software"] for each in content["events"]})}
    content = content | {"software": content["software"] | began}
    return template.render(
        statement=content,
        claims=[_told(claim) for claim in (*content["claims"], _budget(content))],
        sections=[(name.replace("_", " "), _rows(content[name])) for name in _SECTIONS],
        ledger=_rows(content["ledger"]),
        digest=sha256(signed).hexdigest(),
        public=public,
    )


def _budget(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a ledger claims, in the form of a claim: its budget."""
    return {
        **content["claims"][-1],
        **content["ledger"]["budget"],
        "scope": "budget",
        "runs": [each["run"] for each in content["events"]],
        "accountant": "a privacy filter over whole runs",
        "sampling": "that of each run",
        "reason": "",
        "condition": "whatever was chosen from outputs",
    }


def _told(claim: dict[str, Any]) -> dict[str, str]:
    epsilon = "infinite" if claim["epsilon"] is None else round_up(claim["epsilon"], 4)
    return {
        "scope": _SCOPES[claim["scope"]] + f", {claim['condition']}" * bool(claim["condition"]),
        "runs": ", ".join(claim["runs"]),
        "observer": claim["observer"],
        "who": _OBSERVED[claim["observer"].partition("(")[0]],
        "epsilon": epsilon,
        "delta": round_up(claim["delta"], 3),
        "how": claim["reason"] or f"{claim['accountant']}; {claim['sampling']}",
    }


def _rows(value: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the fields of a section as names and texts."""
    found = []
    for name, item in value.items():
        if isinstance(item, dict):
            found += [(f"{name}: {inner}".replace("_", " "), text) for inner, text in _rows(item)]
        else:
            text = ", ".join(map(str, item)) if isinstance(item, list) else str(item)
            found.append((name.replace("_", " "), text))
    return found


def registry_entry(content: dict[str, Any]) -> str:
    """Return the deployment as YAML, by the fields of OpenDP's registry at its third tier of transparency.

    What only the data curator knows is left to be filled in. Texts are quoted as JSON quotes them, which is YAML where
    letters beyond its first plane stay themselves; numbers have a point, as YAML 1.1 takes 1e-05 for a text.
    """
    subject, unit, trust = content["subject"], content["unit"], content["trust_model"]
    budget = _budget(content)
    of_run = [each for each in content["claims"] if each["observer"] == trust.get("against")]
    chosen = of_run[0] if content["plan"] else budget
    others = "; ".join(
        f"{each['observer']}, {told['scope']} ({told['runs']}): {told['epsilon']}"
        for each, told in ((each, _told(each)) for each in (*content["claims"], budget))
    )
    entry = {
        "status": "Draft",
        "registry_authors": [_TO_FILL],
        "tier": 3,
        "deployment": {
            "name": subject.get("title") or subject["name"],
            "data_curator": _TO_FILL,
            "description": f"{subject['kind']} {subject['name']}. {subject.get('data', '')}".strip(),
            "intended_use": _TO_FILL,
            "data_product_type": "Machine learning model" if content["plan"] else _TO_FILL,
            "publication_date": content["issued"],
            "data_product_region": _TO_FILL,
            "data_product_sector": _TO_FILL,
            "dp_flavor": {
                "name": "Approximate DP",
                "data_domain": subject.get("data") or _TO_FILL,
                "unprotected_quantities": "The plan, the population's size and the number of attempts; "
                + " ".join(content["not_covered"]),
            },
            "privacy_loss": {
                "privacy_unit": unit["name"],
                "privacy_unit_description": f"{unit['means']}; {content['adjacency']['name']}: "
                f"{content['adjacency']['means']}",
                "privacy_parameters": {"epsilon": chosen["epsilon"], "delta": chosen["delta"]},
                "privacy_parameters_description": f"Against {chosen['observer']}, {_told(chosen)['scope']}. "
                f"Against each observer: {others}.",
            },
            "model": {
                "model_name": "Federated",
                "model_name_description": trust["name"],
                "actors": trust["means"],
                "is_many_release": True,
                "is_many_release_description": f"{content['released']['what']}; at most "
                f"{content['released']['at_most']}",
                "is_dynamic": False,
                "is_interactive": False,
            },
            "accounting": {
                "post_processing": "Models are made from the noisy sums alone.",
                "composition": f"{chosen['accountant']}; {chosen['sampling']}; at most "
                f"{chosen['max_participations']} participations of a client; chain head {content['ledger']['head']}",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": content["tuning"]["means"],
                "mechanisms": f"{content['mechanism']['name']}; {content['evaluation']['floating_point']}",
                "justification": " ".join(content["assumptions"]),
            },
            "additional_information": f"d2pfed {content['software']['version']}, digest "
            f"{content['software']['digest']}; signed certificate in certificate.json",
        },
    }
    return "\n".join(_yaml(entry, "")) + "\n"


def _yaml(value: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{name}:", *_yaml(item, f"{indent}  ")]
            continue
        text = "".join(each if each.isprintable() else "\ufffd" for each in json.dumps(item, ensure_ascii=False))
        if isinstance(item, float):
            mantissa, mark, exponent = repr(item).partition("e")
            text = (mantissa if "." in mantissa else f"{mantissa}.0") + mark + exponent
        lines.append(f"{indent}{name}: {text}")
    return lines
