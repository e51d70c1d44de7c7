"""The report shows the run's numbers, all of them that may be shown, and nothing else."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from d2pfed.accounting import CLIENT, Adjacency, Sampling, colluding, round_up
from d2pfed.errors import ConfigError
from d2pfed.numerics.randomness import Stream, digest
from d2pfed.plan import MechanismName, PrivacyTarget, calibrate, describe
from d2pfed.runs import End, ExchangeRecord
from d2pfed.runs.report import RunReport, guarantee_text, meaning, render, write_report
from d2pfed.runs.report.content import in_bytes, table
from d2pfed.runs.report.plots import MOST_POINTS, Ink, Line, Plot, draw, plots_of, thin
from support.reports import Page, in_the_clear, interrupted, outside, records, report, with_summary

HOSTILE = """</p><script>alert(1)</script>"'><img src=x onerror=y>{{ 7 * 191 }}{% raw %}`<b>`&amp;"""
SECRET_SURVIVORS, SECRET_ATTEMPT, SECRET_SECONDS, SECRET_ASKED = 9173, 7193, 8191.25, 5077


def written(given: RunReport, directory) -> str:
    return write_report(given, directory).read_text("utf-8")


def files(directory) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_page_and_each_plot_as_png_and_svg_are_written(tmp_path):
    assert write_report(report(12), tmp_path) == tmp_path / "report.html"
    names = ("accuracy", "attempts", "loss", "noise", "survivors", "upload")
    plots = {f"plots/{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert set(files(tmp_path)) == {"report.html"} | plots


def test_equal_reports_give_equal_bytes_whatever_the_plotter_was_set_to(tmp_path):
    for name, width in (("first", 1.0), ("second", 9.0)):
        (tmp_path / name).mkdir()
        with mpl.rc_context({"lines.linewidth": width, "font.size": 10 * width, "svg.hashsalt": name}):
            write_report(report(12), tmp_path / name)
    assert files(tmp_path / "first") == files(tmp_path / "second")
    (tmp_path / "third").mkdir()
    write_report(with_summary(report(12), test_metrics={"accuracy": 0.8766}), tmp_path / "third")
    assert files(tmp_path / "first") != files(tmp_path / "third")


def test_plotting_leaves_no_trace_in_the_plotters_settings():
    before = dict(mpl.rcParams)
    draw(plots_of(report(2))[0])
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("rounds", [0, 1, 12])
def test_page_and_plots_are_well_formed_and_need_nothing_from_outside(tmp_path, rounds):
    html = written(report(rounds), tmp_path)
    assert outside(html) == []
    names = [attributes["id"] for _, attributes in Page.read(html).tags if "id" in attributes]
    assert len(names) == len(set(names))
    targets = re.findall(r'(?:url\(|href=")#([^")]*)', html)
    assert set(targets) <= set(names)
    for path in (tmp_path / "plots").glob("*.svg"):
        assert ET.fromstring(path.read_text()).tag.endswith("svg")
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "planted",
    [
        '<p><img src="x.png"></p>',
        "<p><script></script></p>",
        '<p style="background: url(x.png)"></p>',
        '<p><a href="http://example.org">x</a></p>',
        "<style>@import 'x.css';</style>",
        '<p onclick="x"></p>',
    ],
)
def test_the_check_for_outside_references_finds_a_planted_one(planted):
    assert outside(planted)


@pytest.mark.parametrize("planted", ["<p><b></p>", "<p>", "</p>", "<p><b></p></b>"])
def test_the_check_for_well_formed_pages_rejects_a_planted_fault(planted):
    with pytest.raises(AssertionError):
        Page.read(planted)


def with_text(name: str, text: str) -> RunReport:
    """Return a report that has the text in one place."""
    given = report(2)
    match name:
        case "settings":
            return replace(given, settings=((text, text),))
        case "warnings":
            return replace(given, plan_summary=replace(given.plan_summary, warnings=(text,)))
        case "reason":
            first, *rest = given.summary.guarantees
            return with_summary(given, guarantees=(replace(first, epsilon=math.inf, reason=text), *rest))
        case "stopped":
            return with_summary(given, stopped=text, test_metrics=None, end=End.INTERRUPTED)
        case "metric":
            rounds = tuple(replace(record, metrics={text: 1.0}) for record in given.rounds)
            return replace(with_summary(given, test_metrics={text: 1.0}), rounds=rounds)
        case "exchange":
            lap = ExchangeRecord(text, 5, 5, 0.5, 1, 1)
            return replace(given, rounds=tuple(replace(record, exchanges=(lap,)) for record in given.rounds))
    return replace(given, **{name: text})


@pytest.mark.parametrize(
    "name", ["title", "run", "data", "stopped", "ledger", "settings", "warnings", "reason", "metric", "exchange"]
)
def test_hostile_text_stays_text(name):
    html = render(with_text(name, HOSTILE), [])
    assert outside(html) == []
    page, calm = Page.read(html), Page.read(render(with_text(name, "calm"), []))
    assert [tag for tag, _ in page.tags if tag != "code"] == [tag for tag, _ in calm.tags if tag != "code"]
    assert "alert(1)" in page.text
    assert "1337" not in html  # the template's language is not spoken by values


def test_the_check_for_hostile_text_fails_where_nothing_is_escaped():
    with pytest.raises(AssertionError):
        assert outside(render(with_text("run", "calm"), []).replace("<h1>calm", f"<h1>{HOSTILE}")) == []


def test_every_observer_has_its_exact_epsilon_and_all_that_it_depends_on():
    given = report(12)
    listed = given.summary.guarantees
    given = with_summary(given, guarantees=(*listed, replace(listed[1], observer=colluding(3), epsilon=11.25)))
    page = Page.read(render(given, []))
    exact = [attributes["value"] for tag, attributes in page.tags if tag == "data"]
    assert [float(value) for value in exact] == [item.epsilon for item in given.summary.guarantees]
    for item in given.summary.guarantees:
        words = guarantee_text(given, item)
        assert words.sentence in page.text
        assert words.scope in page.text
        assert round_up(item.delta, 3) in words.sentence
        assert str(item.unit) in words.sentence
        for part in (str(item.adjacency), item.sampling, f"at most {item.max_participations} times"):
            assert part in words.scope


def test_an_infinite_epsilon_is_said_plainly_with_its_reason():
    given = report(12, MechanismName.SHARED)
    exposed = next(item for item in given.summary.guarantees if item.observer == CLIENT)
    assert exposed.epsilon == math.inf
    page = Page.read(render(given, []))
    assert f"may learn anything about a client: epsilon is infinite: {exposed.reason}" in page.text
    assert "nan" not in page.text.lower().split()


def test_what_is_not_finite_leaves_its_plot_out():
    given = report(3)
    given = replace(
        given,
        rounds=tuple(replace(record, metrics=record.metrics | {"loss": math.nan}) for record in given.rounds),
    )
    assert "loss" not in [plot.name for plot in plots_of(given)]
    assert Page.read(render(given, [])).cells[2] == "not finite"


def test_a_huge_epsilon_is_not_called_a_protection():
    given = report(2)
    large, small = (
        guarantee_text(given, replace(given.summary.guarantees[0], epsilon=value)).sentence
        for value in (20.5, 19.5)
    )
    assert "too much to call a protection" in large
    assert "too much" not in small


def test_the_table_of_rounds_has_the_runs_numbers():
    given = report(12)
    cells = Page.read(render(given, [])).cells
    for place, record in enumerate(given.rounds):
        row = cells[7 * place : 7 * place + 7]
        assert int(row[0]) == record.round
        assert float(row[1].removesuffix(" %")) == pytest.approx(100 * record.metrics["accuracy"], abs=0.005)
        assert float(row[2]) == pytest.approx(record.metrics["loss"], rel=5e-4)
        assert int(row[3]) == record.charged
        assert float(row[4]) == pytest.approx(record.update_norm, rel=5e-4)
        assert (int(row[5]), float(row[6])) == (record.survivors, pytest.approx(record.seconds, abs=0.0051))


def test_facts_settings_reasons_and_verification_are_on_the_page():
    given = report(12)
    html = render(given, [])
    page, reasons = Page.read(html), given.plan_summary
    for part in (
        "87.65 %",
        f"{reasons.bits} bits",
        f"{reasons.upload_bytes:,} bytes",
        reasons.why_noise.replace("`", ""),
        reasons.why_bits,
        reasons.why_compression,
        "d2pfed ledger verify ledger.sqlite",
        given.plan.digest.hex(),
        given.data,
        "local.lr 0.2",
        f"quorum {given.plan.quorum}",
        f"sampling.population {given.plan.sampling.population}",
    ):
        assert " ".join(part.split()).replace(" ", "") in page.text.replace(" ", "")
    assert "the file that the run was given" in render(replace(given, ledger=None), [])
    assert "protects nobody" not in html
    assert "can remove the noise" in render(with_summary(given, repeatable=True), [])


def test_an_interrupted_run_has_no_test_accuracy():
    given = interrupted(5)
    page = Page.read(render(given, []))
    assert "Stopped after round 5 of 12: interrupted." in page.text
    assert "Test accuracy" not in page.text
    assert "if nobody stopped it" not in page.text
    exact = [float(attributes["value"]) for tag, attributes in page.tags if tag == "data"]
    assert exact == [item.epsilon for item in given.summary.guarantees]


def test_what_was_spent_so_far_stands_beside_only_where_it_is_given():
    given = interrupted(5)
    so_far = tuple(replace(item, epsilon=item.epsilon / 2) for item in given.summary.guarantees)
    page = Page.read(render(with_summary(given, so_far=so_far), []))
    assert f"so far {round_up(so_far[0].epsilon, 4)}, if nobody stopped it for what was seen" in page.text


def test_a_run_that_cannot_go_on_says_so():
    given = with_summary(interrupted(5), stopped="all attempts are charged", end=End.EXHAUSTED)
    page = Page.read(render(given, []))
    assert "Ended after round 5 of 12: all attempts are charged. It cannot go on" in page.text
    assert "resumes" not in page.text


def test_attempts_charged_stand_beside_the_most_that_epsilon_covers():
    given = report(12)
    assert f"{given.summary.charged} of {given.plan.max_attempts}" in Page.read(render(given, [])).text


def test_a_run_without_a_round_shows_the_plan_and_plots_nothing(tmp_path):
    given = with_summary(interrupted(0), stopped="the budget is spent", end=End.EXHAUSTED, metrics={})
    page = Page.read(written(given, tmp_path))
    assert "No round is complete" in page.text
    assert "the whole plan's" in page.text
    assert "svg" not in [tag for tag, _ in page.tags]


def test_an_observer_that_is_not_listed_has_the_plans_guarantee():
    given = report(2)
    unusual = replace(given, plan=replace(given.plan, against=colluding(7)))
    assert f"{round_up(given.plan.epsilon, 4)} against colluding(7)" in Page.read(render(unusual, [])).text


def planted(kind: MechanismName, scheme: Sampling) -> RunReport:
    """Return a report whose last round has values that are found nowhere else."""
    given = report(12, kind, scheme)
    last = replace(given.rounds[-1], survivors=SECRET_SURVIVORS, attempt=SECRET_ATTEMPT, seconds=SECRET_SECONDS)
    last = replace(last, exchanges=(ExchangeRecord("masking", SECRET_ASKED, SECRET_ASKED, 6133.5, 1, 1),))
    return replace(given, rounds=(*given.rounds[:-1], last))


def leaked(directory) -> set[str]:
    """Return which of the planted values any written text shows."""
    text = "".join(path.read_text("utf-8") for path in directory.rglob("*") if path.suffix in {".html", ".svg"})
    numbers = set(re.findall(r"(?<![\d.])[\d,]*\d(?:\.\d+)?", text))
    forms = {"survivors": ("9,173", "9173"), "seconds": ("8191.25", "8,191.25")}
    forms |= {"exchanges": ("5,077", "5077"), "exchange seconds": ("6133.50", "6,133.50")}
    found = {name for name, shown in forms.items() if numbers & set(shown)}
    return found | {"retried" for _ in re.findall("more than one attempt", text)}


def test_a_report_shows_survivors_times_and_exchanges(tmp_path):
    written(planted(MechanismName.CENTERED, Sampling.FIXED), tmp_path)
    assert leaked(tmp_path) == {"survivors", "seconds", "retried", "exchanges", "exchange seconds"}


@pytest.mark.parametrize("rounds", [1_000, 5_000])
def test_a_long_run_has_a_page_of_bounded_size(tmp_path, rounds):
    html = written(report(rounds), tmp_path)
    assert len(html) < 300_000
    page = Page.read(html)
    assert f"50 of {rounds}" in page.text
    assert (page.cells[0], page.cells[7 * 49]) == ("1", f"{rounds:,}")


def test_a_fold_is_reported_with_what_it_cost_by_round():
    given = report(3)
    target = PrivacyTarget(dimension=40, population=1000, cohort_size=20, rounds=3, epsilon=2.0, compression=16)
    plan = calibrate(target)
    given = replace(given, plan=plan, plan_summary=describe(target, plan))
    noise = given.noise_in(given.rounds[0])
    norms = [noise * math.sqrt(1 + rho) for rho in (2.0, 0.5, -0.1)]
    rounds = [replace(record, update_norm=norm) for record, norm in zip(given.rounds, norms, strict=True)]
    given = replace(given, rounds=tuple(rounds))
    assert [given.rho_in(record) for record in rounds] == pytest.approx([2.0, 0.5, 0.0])
    loud = replace(given.rounds[0], update_norm=math.sqrt(1.5) * noise)
    assert given.signal_in(loud) == pytest.approx(math.sqrt(0.5 * 16 / 40) * noise)  # its terms are no signal
    page = Page.read(render(given, []))
    assert "rho" in page.text
    assert "% more noise would have" in page.text
    for rho in map(given.rho_in, given.rounds):
        assert f"{rho:.3g}" in page.cells


def test_the_estimate_of_rho_is_that_of_the_encoded_mean():
    """Sent through codec and noise, a mean of known length has the rho of its formula up to chance."""
    plan = calibrate(
        PrivacyTarget(dimension=4000, population=1000, cohort_size=20, rounds=3, epsilon=9.0, compression=512)
    )
    update = np.sin(np.arange(4000)).astype(np.float32)
    update *= 0.9 / np.linalg.norm(update)
    deviation = math.sqrt(plan.noise(20).sum_variance)
    found = []
    for number in range(20):
        centers = plan.codec.prepare(update, digest(number))
        sent = 20 * centers.values / (1 << centers.fraction_bits)
        noise = deviation * ndtri((Stream(digest(number)).words(512) + 0.5) / 2.0**64)
        mean = plan.codec.decode(np.rint(sent + noise).astype(np.int64), digest(number), 20)
        found.append((np.linalg.norm(mean) / (deviation * plan.codec.granularity / 20)) ** 2 / 4000 - 1)
    spread = deviation * plan.codec.granularity / 20
    assert np.mean(found) == pytest.approx(0.81 / (512 * spread**2), rel=0.1, abs=2 * math.sqrt(2 / 512 / 20))


def test_noise_in_a_round_shrinks_with_the_clients_that_are_missing():
    given = report(2)
    plan = given.plan
    norm = math.sqrt(40) * plan.sigma / plan.cohort_size  # of 40 parameters
    full, half = (replace(given.rounds[0], survivors=count) for count in (20, 5))
    assert given.noise_in(full) == pytest.approx(norm)
    assert given.noise_in(half) == pytest.approx(norm / 2)
    assert given.signal_in(replace(full, update_norm=5 * norm / 3)) == pytest.approx(4 * norm / 3)
    assert given.signal_in(replace(full, update_norm=0.0)) == 0


def test_noise_that_all_share_does_not_depend_on_survivors():
    given = report(2, MechanismName.SHARED)
    few, all_ = (replace(given.rounds[0], survivors=count) for count in (5, 20))
    assert given.noise_in(few) == given.noise_in(all_) > 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3 * MOST_POINTS), st.integers(1, 5))
def test_thinning_keeps_ends_extremes_and_order_and_is_bounded(ys, repeats):
    ys = ys * repeats
    xs = [float(place) for place in range(len(ys))]
    kept_xs, kept_ys = thin(xs, ys)
    assert len(kept_xs) == len(kept_ys) <= MOST_POINTS
    assert list(kept_xs) == sorted(set(kept_xs))
    assert all(ys[int(x)] == y for x, y in zip(kept_xs, kept_ys, strict=True))
    assert (kept_xs[0], kept_xs[-1]) == (xs[0], xs[-1])
    assert (min(kept_ys), max(kept_ys)) == (min(ys), max(ys))


@given(st.floats(1e-300, 1e300), st.integers(2, 6))
def test_a_printed_bound_is_never_below_the_bound_and_close_to_it(value, digits):
    shown = float(round_up(value, digits).replace(",", ""))
    assert value <= shown * (1 + 1e-15)
    assert shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)


def test_bounds_read_as_people_write_them():
    assert [round_up(value, 4) for value in (8.0, 7.99555, 516.69761, 0.0)] == ["8", "7.996", "516.7", "0"]
    assert [round_up(value, 3) for value in (3.1623e-6, 1e-5, 2980.958, 2.6e7)] == [
        *("3.17e-6", "1e-5", "2990", "2.6e7"),
    ]
    assert (round_up(math.inf, 4), round_up(math.nan, 4)) == ("infinite", "not a number")
    assert [in_bytes(size) for size in (12, 1_024, 51_370, 5.137e6, 2e9)] == [
        *("12 bytes", "1.02 kB", "51.4 kB", "5.14 MB", "2 GB"),
    ]


def test_the_meaning_of_epsilon_names_the_other_world():
    assert "anything else in its place (replace-one)" in meaning(Adjacency.REPLACE_ONE)
    assert "nothing but noise in its place (zero-out)" in meaning(Adjacency.ZERO_OUT)


def test_one_colluder_and_several_are_worded():
    given = report(2)
    one, three = (
        guarantee_text(given, replace(given.summary.guarantees[1], observer=colluding(count))) for count in (1, 3)
    )
    assert "with 1 client that tells it their noise" in one.sentence
    assert "with 3 clients that tell it their noise" in three.sentence


def test_backticks_make_code_only_in_pairs():
    paired, odd = (Page.read(render(with_text("warnings", text), [])) for text in ("see `this`", "see `this"))
    assert "see this" in paired.text
    assert "see `this" in odd.text


def test_a_quorum_below_the_cohort_is_drawn_and_captioned():
    given = report(2)
    given = replace(given, plan=replace(given.plan, quorum=17))
    given = replace(given, rounds=(given.rounds[0], replace(given.rounds[1], survivors=18, attempt=2)))
    panel = plots_of(given)[-1]
    assert [line.name for line in panel.lines] == ["cohort 20", "quorum 17", "last 18"]
    assert panel.caption == (
        "Between 18 and 20 of 20 clients were in a round's sum; a sum over fewer than 17 is never unmasked. "
        "1 of 2 rounds needed more than one attempt."
    )


def test_labels_of_lines_at_one_height_do_not_cover_each_other():
    lines = tuple(Line(f"line {number}", Ink.MAIN, (1.0,)) for number in range(4))
    drawing = draw(Plot(name="same", title="Same", across="round", lines=lines))
    heights = sorted(
        float(re.search(rf'(?:translate\(|y=")[^>]*?([\d.]+)[)" ][^>]*>line {number}<', drawing.svg)[1])
        for number in range(4)
    )
    assert all(above - below > 8 for below, above in pairwise(heights))


def test_inline_plots_take_every_colour_from_the_style_sheet():
    line = Line("x", Ink.MAIN, (0.0, 1.0), (1.0, 2.0))
    inline = draw(Plot(name="colours", title='A "quoted" <title>', across="round", lines=(line,))).inline
    assert set(re.findall(r"#[0-9a-f]{6}\b", inline)) == set()
    assert 'aria-label="A &quot;quoted&quot; &lt;title&gt;, by round"' in inline


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"round": 0}, "round's number must be at least 1, got 0"),
        ({"metrics": {"accuracy": 1.5}}, r"accuracy of round 1 must be in \[0, 1\], got 1.5"),
        ({"metrics": {"accuracy": math.nan}}, "got nan"),
        ({"charged": -1}, "charged must be at least 0, got -1"),
        ({"update_norm": math.inf}, "update norm must be finite and at least 0, got inf"),
        ({"survivors": -1}, "survivors must be at least 0, got -1"),
        ({"seconds": -0.5}, "seconds must be at least 0, got -0.5"),
    ],
)
def test_an_impossible_round_is_refused(change, rule):
    with pytest.raises(ConfigError, match=rule):
        replace(records(1)[0], **change)


def test_an_impossible_report_is_refused():
    given = report(3)
    with pytest.raises(ConfigError, match="in order"):
        replace(given, rounds=given.rounds[::-1])
    with pytest.raises(ConfigError, match="2 rounds were planned, the summary has 3"):
        replace(given, planned_rounds=2)
    with pytest.raises(ConfigError, match="the summary has 2 and the metrics go up to 3"):
        with_summary(given, rounds=2)
    with pytest.raises(ConfigError, match="accuracy of the test must be in"):
        with_summary(given, test_metrics={"accuracy": -0.1})


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "plots").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write the report in"):
        write_report(report(0), tmp_path)


def test_a_round_whose_survivors_are_not_known_leaves_their_plot_out():
    given = report(2)
    silent = tuple(replace(record, survivors=None, attempt=None, seconds=None) for record in given.rounds)
    assert "survivors" not in [plot.name for plot in plots_of(replace(given, rounds=silent))]
    assert "survivors" in [plot.name for plot in plots_of(given)]


# Runs in the clear, and runs whose messages travel


def test_a_run_in_the_clear_says_that_nothing_is_private(tmp_path):
    page = Page.read(written(in_the_clear(12), tmp_path))
    assert "trained in the clear: it protects nobody" in page.text
    assert "32 bits" in page.text
    for word in ("What each observer", "attempts charged", "ledger", "delta", "digest", "masked"):
        assert word not in page.text, word
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"accuracy", "loss"}
    assert outside((tmp_path / "report.html").read_text()) == []


def test_a_private_run_does_not_say_that_it_is_in_the_clear():
    assert "in the clear" not in render(report(12), [])


def test_exchanges_have_the_median_of_their_seconds_and_who_answered():
    given = report(3)
    laps = [
        (ExchangeRecord("keys", 20, 20, 9.0, 1, 1), ExchangeRecord("masking", 20, 20 - place, seconds, 1, 1))
        for place, seconds in enumerate((0.25, 7.75, 0.5))
    ]
    rounds = tuple(replace(record, exchanges=own) for record, own in zip(given.rounds, laps, strict=True))
    page = Page.read(render(replace(given, rounds=rounds), []))
    assert "Seconds by exchange" in page.text
    assert page.cells[21:27] == ["keys", "9.00", "60 of 60", "masking", "0.50", "57 of 60"]
    assert "Seconds by exchange" not in render(given, [])


def test_metrics_of_any_name_are_shown_if_every_round_has_them():
    given = report(2)
    one, two = given.rounds
    rounds = (replace(one, metrics={"f1": 0.25, "extra": 1.0}), replace(two, metrics={"f1": 0.75}))
    given = with_summary(replace(given, rounds=rounds), metrics={"f1": 0.75}, test_metrics={})
    assert given.metric_names == ("f1",)
    page = Page.read(render(given, []))
    assert page.cells[1:8:6] == ["0.25", "0.75"]
    assert "Validation f1 0.75" in page.text
    assert plots_of(given)[0].name == "f1"


NAMES = ("../../outside", "/outside", HOSTILE, ".hidden", "a" * 300, r"$\frac$", "..")


def named(*names: str) -> RunReport:
    """A report whose metrics have these names."""
    given = report(2)
    metrics = dict.fromkeys(names, 0.5)
    rounds = tuple(replace(record, metrics=metrics) for record in given.rounds)
    return with_summary(replace(given, rounds=rounds), metrics=metrics, test_metrics={})


def test_a_metrics_name_leads_no_file_elsewhere_and_is_no_code_of_the_page(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    page = written(named(*NAMES), run)
    plots = {f"metric-{number}" for number in range(1, len(NAMES) + 1)} | {
        "attempts",
        "noise",
        "survivors",
        "upload",
    }
    assert {Path(name).stem for name in files(tmp_path)} == plots | {"report"}
    assert outside(page) == []
    monkeypatch.setattr("d2pfed.runs.report.plots.is_plain", lambda _name: True)
    with pytest.raises(ConfigError, match="a plot's name must be letters"):
        write_report(named("../../outside"), run)
    # Without both checks.
    monkeypatch.setattr("d2pfed.runs.report.plots.check_name", lambda *_: None)
    write_report(named("../../outside"), run)
    assert (tmp_path / "runs" / "outside.png").exists()
    given = named(HOSTILE)
    assert "<script>" in render(given, [(plot, draw(plot)) for plot in plots_of(given)])


def test_a_report_is_not_written_through_a_link(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plots").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "run" / "report.html").symlink_to(tmp_path / "kept")
    with pytest.raises(ConfigError, match="plots must not be a link: files would be written elsewhere"):
        write_report(report(2), tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    monkeypatch.setattr("d2pfed.runs.report.require_no_link", lambda _path: None)
    write_report(report(2), tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) != []
    assert (tmp_path / "kept").read_text() == "kept"  # a file that is replaced takes the place of a link


def test_a_run_without_any_evaluation_has_a_report():
    given = report(2)
    rounds = tuple(replace(record, metrics={}) for record in given.rounds)
    given = with_summary(replace(given, rounds=rounds), metrics={}, test_metrics={})
    assert "no evaluation was given" in Page.read(render(given, [])).text
    assert [plot.name for plot in plots_of(given)] == ["attempts", "noise", "survivors"]


def test_test_data_that_do_not_exist_are_not_said_to_be_closed():
    given = with_summary(report(12), test_metrics={})
    assert "Validation accuracy 81.23 % no test data was given" in Page.read(render(given, [])).text
    assert "81.23 % test data not opened yet" in Page.read(render(interrupted(5), [])).text


def test_lists_in_settings_are_readable_and_bounded():
    arrays = [
        {"": "ArrayShape", "name": "weight", "shape": [2, 3]},
        {"": "ArrayShape", "name": "bias", "shape": []},
    ]
    rows = dict(table({"arrays": arrays, "clients": list(range(100_000))}))
    assert rows["arrays"] == "weight (2, 3), bias ()"
    assert rows["clients"].startswith("0, 1, 2, ")
    assert rows["clients"].endswith(", 19, and 99,980 more")
