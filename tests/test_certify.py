"""A certificate is written of every kind of run that guarantees something, of no other, and tells nobody's part."""

import ast
import json
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import d2pfed
import d2pfed.certificate_verifier as verifier
from d2pfed.api.certify import certify, check_ledger, registry_entry
from d2pfed.errors import D2PFedError
from d2pfed.ledger import Budget, Ledger
from d2pfed.ledger.files import files_digest, software_digest
from d2pfed.numerics import canonical
from d2pfed.plan import decode_plan
from d2pfed.runs import directory
from d2pfed.statistics import release
from reproduction.job import execute
from support.certificates import KINDS, PUBLIC, certified, forged, job, key_in, statistics, train
from support.commands import run_command
from support.reports import Page, outside


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return where the certified runs of this process are."""
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def key(runs) -> Path:
    return key_in(runs)


def command(arguments: list, monkeypatch, capsys) -> tuple[int, str, str]:
    return run_command(["certify", *arguments], monkeypatch, capsys)


def refusal(arguments: list, monkeypatch, capsys) -> str:
    status, printed, complaint = command(arguments, monkeypatch, capsys)
    assert (status, printed, complaint.count("\n")) == (2, "", 1)
    return complaint


@pytest.mark.parametrize("kind", KINDS)
def test_the_certificate_of_a_run_of_each_kind_holds(runs, key, kind):
    path = certified(runs, kind)
    found = verifier.verify(path / "certificate.json", [PUBLIC])
    assert found.status == 0, found.lines
    observers = [line for _, line in found.lines if line.startswith("run against")]
    assert len(observers) >= 4
    statement = json.loads((path / "certificate.json").read_text())["statement"]
    assert "holds" not in check_ledger(statement, path / "ledger.sqlite")


@pytest.mark.parametrize(("kind", "drawer"), [("record", "each silo"), ("fixed", "the server alone")])
def test_a_certificate_says_who_draws_and_that_coins_are_secret(runs, key, kind, drawer):
    statement = json.loads((certified(runs, kind) / "certificate.json").read_text())["statement"]
    assert statement["sampling"]["enforced_by"].startswith(drawer)
    assert any("secret coin" in assumed for assumed in statement["assumptions"]) == (kind == "record")


@pytest.mark.parametrize(
    ("kind", "word", "is_said"),
    [
        ("once", "more colluders than stated has a chance of at most 2^-40 for each cohort size, which", True),
        ("fixed", "no client's own budget ends before its cap", True),
        ("fixed", "no attempt that was void asked for vectors", True),
        ("fixed", "no client keeps a state", True),
        ("once", "no client keeps a state", False),
        ("once", "no client refuses because its own budget is spent", True),
    ],
)
def test_a_certificate_says_what_else_its_rows_rest_on(runs, key, kind, word, is_said):
    directory = certified(runs, kind)
    statement = json.loads((directory / "certificate.json").read_text())["statement"]
    assert any(word in assumed for assumed in statement["assumptions"]) is is_said
    assert (word in Page.read((directory / "certificate.html").read_text()).text) is is_said


def test_a_run_over_flower_is_certified_with_its_trust_model(tmp_path, key):
    pytest.importorskip("flwr", reason="Flower is not installed (extra `flower`)")
    from support.enrolled_clients import enrol, make_plan  # noqa: PLC0415
    from support.local_grid import make_grid, make_strategy, start  # noqa: PLC0415

    start(make_strategy(make_plan(), tmp_path, enrol(tmp_path, 5)), make_grid(tmp_path))
    made = certify(tmp_path / "run", key=key)
    assert verifier.verify(made.certificate, [PUBLIC]).status == 0
    statement = json.loads(made.certificate.read_text())["statement"]
    assert statement["trust_model"]["consistency"] == "signed"
    assert statement["participations"]["enforced_by"].startswith("each client")


CONDITION = "if no plan or stop depended on outputs"


def test_a_ledger_claims_its_budget_and_its_runs_on_a_condition(tmp_path, key):
    made = certify(statistics(tmp_path / "statistics.sqlite", 3), key=key)
    found = verifier.verify(made.certificate, [PUBLIC])
    assert found.status == 0, found.lines
    statement = json.loads(made.certificate.read_text())["statement"]
    together = [claim for claim in statement["claims"] if claim["scope"] == "composed"]
    assert [claim["condition"] for claim in together] == [CONDITION]
    alone = [claim for claim in statement["claims"] if claim["scope"] == "run"]
    assert {claim["condition"] for claim in alone} == {""}
    assert statement["ledger"]["budget"]["epsilon"] == 20.0 > together[0]["epsilon"] > alone[1]["epsilon"]
    for change in (
        lambda s: s["claims"][-1].update(condition=""),
        lambda s: s["claims"][-1].update(condition="", scope="run"),
        lambda s: s["claims"][0].update(condition=CONDITION),
    ):
        assert verifier.verify(forged(made.certificate, change), [PUBLIC]).status == 1


def test_the_product_of_runs_is_always_stated_with_its_condition(tmp_path, key, monkeypatch, capsys):
    made = certify(statistics(tmp_path / "statistics.sqlite", 3), key=key)
    claims = json.loads(made.certificate.read_text())["statement"]["claims"]
    yaml = pytest.importorskip("yaml")
    loss = yaml.safe_load(made.registry.read_text())["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == 20.0  # the budget
    told = loss["privacy_parameters_description"]
    assert "server, this run (histogram 1): " in told
    product = d2pfed.accounting.round_up(claims[-1]["epsilon"], 4)
    for text in (told, Page.read(made.page.read_text()).text):
        before, _, _ = text.partition(product)
        assert text.count(product) == 1
        assert CONDITION in before[-200:] or CONDITION in text[len(before) : len(before) + 200]
    for arguments in (["show"], ["verify"], ["show", "--json"], ["verify", "--json"]):
        printed = run_command(
            ["ledger", arguments[0], tmp_path / "statistics.sqlite", *arguments[1:]], monkeypatch, capsys
        )
        assert "if no" in printed[1]


def test_a_certificate_that_cannot_be_shown_leaves_the_one_before(tmp_path, key):
    made = certify(statistics(tmp_path / "statistics.sqlite", 1), key=key)
    before = made.certificate.read_bytes()
    made.registry.unlink()
    made.registry.mkdir()
    with pytest.raises(D2PFedError, match="cannot write the certificate"):
        certify(statistics(tmp_path / "others.sqlite", 2), key=key)
    assert made.certificate.read_bytes() == before


def test_a_run_on_a_shared_ledger_names_all_runs_of_it(tmp_path, key):
    work = job(**KINDS["fixed"])
    ledger = tmp_path / "shared.sqlite"
    Ledger.create(ledger, Budget(20.0, work.plan.delta, work.plan.against, work.plan.max_participations)).close()
    train(tmp_path / "first", ledger, **KINDS["fixed"])
    train(tmp_path / "second", ledger, **KINDS["fixed"])
    with pytest.raises(D2PFedError, match="used another ledger: name it with --ledger"):
        certify(tmp_path / "second", key=key)
    made = certify(tmp_path / "second", ledger=ledger, key=key)
    statement = json.loads(made.certificate.read_text())["statement"]
    assert [event["run"] for event in statement["events"]] == ["first", "second"]
    assert {tuple(claim["runs"]) for claim in statement["claims"]} == {("second",), ("first", "second")}
    found = verifier.verify(made.certificate, [PUBLIC])
    assert found.status == 0, found.lines
    assert check_ledger(statement, ledger)
    one = forged(
        made.certificate,
        lambda s: (
            s["events"].pop(0),
            s["claims"].pop(),
            s["ledger"].update(runs=1),
            s["tuning"].update(runs_on_this_ledger=1),
        ),
    )
    assert verifier.verify(one, [PUBLIC]).status == 0  # a liar with the key left a run out: the ledger tells
    with pytest.raises(verifier.Wrong, match="charged other runs"):
        check_ledger(json.loads(one.read_text())["statement"], ledger)
    statement["ledger"]["budget"]["epsilon"] = 1.0
    with pytest.raises(verifier.Wrong, match=r"it allows \{'epsilon': 20\.0"):
        check_ledger(statement, ledger)


def test_what_guarantees_nothing_is_not_certified(tmp_path, key, monkeypatch, capsys):
    plain = job()
    with patch("d2pfed.runs.report.write_report"):
        clear = replace(plain, plan=None, settings=replace(plain.settings, target=None))
        execute(clear, tmp_path / "clear", None, lambda _: True)
    assert "was trained without privacy: there is nothing to certify" in refusal(
        [tmp_path / "clear", "--key", key], monkeypatch, capsys
    )
    train(tmp_path / "seeded", seed=1)
    copied = shutil.copy(tmp_path / "seeded" / "ledger.sqlite", tmp_path / "copied.sqlite")
    for place in (tmp_path / "seeded", tmp_path / "seeded" / "ledger.sqlite", copied):
        assert "can be repeated from its seed, which removes its noise" in refusal(
            [place, "--key", key], monkeypatch, capsys
        )


@pytest.mark.parametrize(
    "name", ["plan.json", "seen", "identity", "settings.json", "summary.json", "ledger.sqlite"]
)
def test_a_run_without_one_of_its_files_is_refused_in_one_line(runs, key, tmp_path, name, monkeypatch, capsys):
    path = shutil.copytree(certified(runs, "once"), tmp_path / "once")
    (path / name).unlink()
    assert refusal([path, "--key", key], monkeypatch, capsys)


def test_a_run_with_anothers_plan_or_an_older_ledger_is_refused(runs, key, tmp_path):
    once, fixed = (certified(runs, kind) for kind in ("once", "fixed"))
    path = shutil.copytree(once, tmp_path / "once")
    plan = decode_plan((path / "plan.json").read_text())
    stronger = replace(plan, epsilon=plan.epsilon / 2)
    (path / "plan.json").write_text(canonical.encode(stronger))
    with pytest.raises(D2PFedError, match=r"has charged no run of .* with its plan"):
        certify(path, key=key)
    other = shutil.copytree(once, tmp_path / "other")
    with pytest.raises(D2PFedError, match="lacks row"):
        certify(other, ledger=fixed / "ledger.sqlite", key=key)
    statement = json.loads((once / "certificate.json").read_text())["statement"]
    with pytest.raises(verifier.Wrong, match="lacks row"):
        check_ledger(statement, fixed / "ledger.sqlite")


def leaves(value: object) -> list:
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in (name, *leaves(item))]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def test_a_certificate_does_not_tell_who_or_how_many_took_part(runs, tmp_path, key):
    """Two runs that differ in nothing but their draws, dropouts and sizes state the same."""
    statements = []
    for path in (certified(runs, "fixed"), train(tmp_path / "fixed", **KINDS["fixed"])):
        statement = json.loads(certify(path, key=key, output=tmp_path / "out").certificate.read_text())[
            "statement"
        ]
        for event in statement["events"]:
            del event["row"]  # a hash of the row that charges the run, its directory's identity among it
        del statement["ledger"]["head"], statement["released"]["model_sha256"]
        statements.append(statement)
    assert statements[0] == statements[1]
    words = {str(leaf) for leaf in leaves(statements[0])}
    assert not words & {"survivors", "participants", "seconds", "charged"}


def test_the_key_is_made_once_for_its_owner_alone(runs, key, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = shutil.copytree(certified(runs, "once"), tmp_path / "once")
    made, own = tmp_path / "config" / "d2pfed" / "certificate.key", path / "certificate.json"
    status, printed, _ = command(["verify", own], monkeypatch, capsys)
    assert status == 3
    assert f"NOT CHECKED signer: the signer, as no key was named: {PUBLIC}" in printed
    status, printed, complaint = command([path], monkeypatch, capsys)
    assert (status, complaint) == (0, "")
    assert f"{made} (just created" in printed
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert command(["verify", own, "--ledger", path / "ledger.sqlite"], monkeypatch, capsys)[0] == 0
    status, printed, _ = command([path, "--json", "--output", tmp_path / "out"], monkeypatch, capsys)
    assert not json.loads(printed)["key_is_new"]
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"certificate.html", "certificate.json", "registry.yaml"}
    status, printed, _ = command(["verify", own, "--key", PUBLIC, "--json"], monkeypatch, capsys)
    assert (status, json.loads(printed)["status"]) == (1, 1)  # it is signed by the new key now
    made.chmod(0o644)
    assert "readable by its owner alone" in refusal([path], monkeypatch, capsys)
    made.chmod(0o600)
    made.write_bytes(b"short")
    assert "must have 32 bytes, got 5" in refusal([path], monkeypatch, capsys)


def test_the_page_stands_alone_and_the_registry_entry_is_yaml(runs, key):
    path = certified(runs, "once")
    page = (path / "certificate.html").read_text()
    assert outside(page) == []
    text = Page.read(page).text
    statement = json.loads((path / "certificate.json").read_text())["statement"]
    assert all(assumption in text for assumption in statement["assumptions"])
    yaml = pytest.importorskip("yaml")
    entry = yaml.safe_load((path / "registry.yaml").read_text())
    deployment = entry["deployment"]
    claims = {claim["observer"]: claim for claim in statement["claims"]}
    assert deployment["privacy_loss"]["privacy_parameters"]["epsilon"] == claims["server"]["epsilon"]
    assert {"dp_flavor", "privacy_loss", "model", "accounting", "implementation"} <= set(deployment)


def test_the_registry_entry_says_what_the_certificate_says(runs, key, tmp_path):
    yaml = pytest.importorskip("yaml")
    title = '\U0001f600 "quoted": {x}\n- item # no comment\x7f\x00\u2028 é'
    statement = json.loads((certified(runs, "once") / "certificate.json").read_text())["statement"]
    statement["subject"]["title"] = title
    for delta in (1e-05, 3.16e-06, 1e-300, 0.25, 1e22):
        for claim in statement["claims"]:
            claim["delta"] = delta
        entry = yaml.safe_load(registry_entry(statement))["deployment"]
        assert entry["privacy_loss"]["privacy_parameters"]["delta"] == delta
        assert entry["name"] == title.replace("\x7f", "\ufffd").replace("\u2028", "\ufffd")


def test_what_a_user_wrote_cannot_break_the_page(runs, key, tmp_path):
    path = shutil.copytree(certified(runs, "once"), tmp_path / "once")
    settings = json.loads((path / "settings.json").read_text())
    settings["title"] = "<script>alert(1)</script>"
    (path / "settings.json").write_text(json.dumps(settings))
    made = certify(path, key=key)
    assert outside(made.page.read_text()) == []
    assert "<script>" not in made.page.read_text()


def test_the_verifier_is_one_file_that_imports_nothing_else_of_ours(runs, key, tmp_path):
    source = Path(verifier.__file__).read_text()
    assert len(source.splitlines()) <= 900
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in found}
    assert roots - set(sys.stdlib_module_names) == {"numpy", "scipy", "dp_accounting", "cryptography"}
    copy = tmp_path / "bare.py"
    copy.write_text(
        source.replace("    sys.exit(main())", "    assert 'd2pfed' not in sys.modules; sys.exit(main())")
    )
    certificate = certified(runs, "fixed") / "certificate.json"

    def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-I", "-W", "error", str(copy), *arguments]
        return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)

    done = bare(str(certificate), "--key", PUBLIC)
    assert (done.returncode, done.stderr) == (0, "")
    assert bare(str(certificate)).returncode == 3
    missing = bare("nothing.json")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


def test_the_digest_of_the_software_is_that_of_its_files(tmp_path):
    copy = shutil.copytree(Path(verifier.__file__).parent, tmp_path / "d2pfed")
    assert files_digest(copy) == software_digest()
    (copy / "errors.py").write_text("# changed\n")
    assert files_digest(copy) != software_digest()


def test_a_certificate_names_the_software_that_began_each_run(tmp_path, key):
    began, ledger = "ab" * 32, tmp_path / "ledger.sqlite"
    with patch.object(directory, "software_digest", lambda: began):
        train(tmp_path / "run")
    with (
        patch.object(release, "software_digest", lambda: began),
        Ledger.create(ledger, Budget(2.0, 1e-5)) as book,
    ):
        d2pfed.private_sum(np.eye(4)[np.arange(20) % 4], epsilon=2.0, ledger=book)
    for subject in (tmp_path / "run", ledger):
        made = certify(subject, key=key)
        statement = json.loads(made.certificate.read_text())["statement"]
        assert {event["software"] for event in statement["events"]} == {began}
        assert statement["software"]["digest"] == software_digest()
        assert verifier.verify(made.certificate, [PUBLIC]).status == 0
        assert began in made.page.read_text()


def test_help_names_both_uses(monkeypatch, capsys):
    _, printed, _ = command(["--help"], monkeypatch, capsys)
    assert "verify" in printed
    assert command([], monkeypatch, capsys)[1] == printed
