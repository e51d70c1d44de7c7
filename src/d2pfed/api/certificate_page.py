"""A certificate for people: one HTML page that needs nothing else, and an entry for OpenDP's deployments registry."""

import json
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from d2pfed.accounting import round_up

_TO_FILL = "to be filled in by the data curator"
_OBSERVED = {
    "released": "whoever sees the released models and nothing of who took part",
    "server": "the server, which knows every sum and every cohort",
    "client": "another client of a cohort",
    "colluding": "the server together with so many clients of a cohort",
    "alone": "the server together with all other clients",
}


def page(statement: dict[str, Any], signed: bytes, public: str) -> str:
    """Return the page of a certificate; equal certificates give equal pages."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("certificate.html.j2").read_text("utf-8"))
    facts = (
        "subject released unit adjacency mechanism sampling participations colluders dropouts tuning trust_model"
    )
    sections = [*facts.split(), "evaluation", "software"]
    began = {"runs began with": sorted({event["software"] for event in statement["events"]})}
    statement = statement | {"software": statement["software"] | began}
    return template.render(
        statement=statement,
        claims=[_told(claim) for claim in (*statement["claims"], _budget(statement))],
        sections=[(name.replace("_", " "), _rows(statement[name])) for name in sections],
        ledger=_rows(statement["ledger"]),
        digest=sha256(signed).hexdigest(),
        public=public,
    )


_SCOPES = {"run": "this run", "composed": "the runs so far", "budget": "all runs of the ledger"}


def _budget(statement: dict[str, Any]) -> dict[str, Any]:
    """Return what a ledger claims, in the form of a claim: its budget."""
    found: dict[str, Any] = (
        statement["claims"][-1]
        | statement["ledger"]["budget"]
        | {
            "scope": "budget",
            "runs": [event["run"] for event in statement["events"]],
            "accountant": "a privacy filter over whole runs",
            "sampling": "that of each run",
            "reason": "",
            "condition": "whatever was chosen from outputs",
        }
    )
    return found


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


def registry_entry(statement: dict[str, Any]) -> str:
    """Return the deployment as YAML, by the fields of OpenDP's registry at its third tier of transparency.

    What only the data curator knows is left to be filled in. Texts are quoted as JSON quotes them, which is YAML where
    letters beyond its first plane stay themselves; numbers have a point, as YAML 1.1 takes 1e-05 for a text.
    """
    subject, unit, trust = statement["subject"], statement["unit"], statement["trust_model"]
    budget = _budget(statement)
    of_run = [each for each in statement["claims"] if each["observer"] == trust.get("against")]
    chosen = of_run[0] if statement["plan"] else budget
    others = "; ".join(
        f"{each['observer']}, {told['scope']} ({told['runs']}): {told['epsilon']}"
        for each, told in ((each, _told(each)) for each in (*statement["claims"], budget))
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
            "data_product_type": "Machine learning model" if statement["plan"] else _TO_FILL,
            "publication_date": statement["issued"],
            "data_product_region": _TO_FILL,
            "data_product_sector": _TO_FILL,
            "dp_flavor": {
                "name": "Approximate DP",
                "data_domain": subject.get("data") or _TO_FILL,
                "unprotected_quantities": "The plan, the population's size and the number of attempts; "
                + " ".join(statement["not_covered"]),
            },
            "privacy_loss": {
                "privacy_unit": unit["name"],
                "privacy_unit_description": f"{unit['means']}; {statement['adjacency']['name']}: "
                f"{statement['adjacency']['means']}",
                "privacy_parameters": {"epsilon": chosen["epsilon"], "delta": chosen["delta"]},
                "privacy_parameters_description": f"Against {chosen['observer']}, {_told(chosen)['scope']}. "
                f"Against each observer: {others}.",
            },
            "model": {
                "model_name": "Federated",
                "model_name_description": trust["name"],
                "actors": trust["means"],
                "is_many_release": True,
                "is_many_release_description": f"{statement['released']['what']}; at most "
                f"{statement['released']['at_most']}",
                "is_dynamic": False,
                "is_interactive": False,
            },
            "accounting": {
                "post_processing": "Models are made from the noisy sums alone.",
                "composition": f"{chosen['accountant']}; {chosen['sampling']}; at most "
                f"{chosen['max_participations']} participations of a client; chain head {statement['ledger']['head']}",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": statement["tuning"]["means"],
                "mechanisms": f"{statement['mechanism']['name']}; {statement['evaluation']['floating_point']}",
                "justification": " ".join(statement["assumptions"]),
            },
            "additional_information": f"d2pfed {statement['software']['version']}, digest "
            f"{statement['software']['digest']}; signed certificate in certificate.json",
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
