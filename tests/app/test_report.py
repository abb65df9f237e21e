"""The report shows the run's numbers, marks what is not private, and escapes all text."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpoptim.app.report.charts import CURVES, Mark, axis, format_number, plot, thin
from dpoptim.app.report.page import all_numbers, guarantee_sentence, page, write_report
from dpoptim.app.runs.run_log import RunHistory, read_runs
from dpoptim.privacy.statement import format_epsilon
from tests.app.page_reader import Element, parsed
from tests.app.report_runs import (
    HOSTILE,
    RECIPE,
    calibrated,
    evaluation_record,
    records,
    start_record,
    step_record,
    write_run,
)

DEBUG_ONLY = {"training-loss", "clipped-fraction"}
ALL_PLOTS = {curve.name for curve in CURVES}
WHERE = {  # each number's place in the log
    "validation-loss": ("evaluation", "loss"),
    "validation-accuracy": ("evaluation", "accuracy"),
    "training-loss": ("step", "not_private", "loss"),
    "clipped-fraction": ("step", "not_private", "clipped_fraction"),
    "signal-over-clip": ("step", "released", "signal_over_clip"),
    "noise-to-signal": ("step", "released", "noise_to_signal"),
    "negative-fraction": ("step", "released", "negative_fraction"),
    "seconds-per-step": ("step", "seconds"),
    "epsilon": ("step", "epsilon"),
}


def page_of(*folders: Path) -> Element:
    return parsed(page(read_runs(folders)))


def plots(root: Element) -> set[str]:
    return {str(svg.attributes["id"]).removeprefix("plot-") for svg in root.all("svg")}


def finite(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.fixture(scope="module")
def debugged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "debugged", records(debug=True))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "plain", records(shift=0.3))


def test_tables_hold_every_logged_number(debugged):
    root = page_of(debugged)
    assert plots(root) == ALL_PLOTS
    assert WHERE.keys() == ALL_PLOTS - {"scales"}
    for name, (kind, *path) in WHERE.items():
        wanted: dict[str, Any] = {}
        for record in records(debug=True):
            if record["kind"] == kind:
                value = record
                for part in path:
                    value = value[part]
                wanted[f"{record['step']:,}"] = value
        head, *rows = root.by_id(f"chart-{name}").rows()
        assert head[0] == "step"
        assert [row[0] for row in rows] == list(wanted), name
        for step, text in rows:
            assert finite(text) == pytest.approx(wanted[step], rel=1e-4 if name == "epsilon" else 6e-6)
            if name == "epsilon":
                assert Decimal(text) >= Decimal(wanted[step])
    _, *rows = root.by_id("chart-scales").rows()
    last = records(debug=True)[-3]
    assert last["step"] == 40
    assert [finite(text) for text in rows[-1][1:]] == pytest.approx(last["released"]["scale_quantiles"], rel=6e-4)


def test_plotted_positions_map_back_to_the_values():
    series = [(1, 5.0), (10, 1.0), (20, 3.0)]
    x, y = axis([1, 10, 20], zero=True), axis([5.0, 1.0, 3.0])
    drawn = plot(thin([[(step, [value] * 3) for step, value in series]], limit=10), y_label="u")
    (line,) = [points for kind, points in drawn["paths"] if kind.startswith("line")]
    points = [tuple(map(float, part.split())) for part in line[1:].split("L")]
    left, right, bottom, top = drawn["left"], drawn["right"], drawn["grid"][0][0], drawn["grid"][-1][0]
    for (across, height), (step, value) in zip(points, series, strict=True):
        assert x.ticks[0] + (across - left) / (right - left) * (x.ticks[-1] - x.ticks[0]) == pytest.approx(
            step, abs=0.02
        )
        assert y.ticks[0] + (bottom - height) / (bottom - top) * (y.ticks[-1] - y.ticks[0]) == pytest.approx(
            value, abs=0.02
        )


def test_charts_have_titles_labels_and_captions(debugged):
    for figure in page_of(debugged).all("figure"):
        assert figure.all("h3")[0].text
        assert figure.all("figcaption")[0].text
        labels = [text.text for text in figure.all("text") if text.attributes.get("class") == "label"]
        assert len(labels) == 2
        assert all(labels)


def test_debug_values_are_marked_not_private(debugged, plain):
    with_debug, without = page_of(debugged), page_of(plain)
    for name in DEBUG_ONLY:
        assert "not private: for debugging" in with_debug.by_id(f"chart-{name}").text
    assert plots(without) == ALL_PLOTS - DEBUG_ONLY
    assert "not private: for debugging" not in without.text
    assert "Clipped fraction: logged only with debug = true" in without.text
    both = page_of(debugged, plain)
    assert "plain: not logged" in both.by_id("chart-clipped-fraction").text
    assert both.by_id("finals").rows()[0][-1] == "Training loss (not private: for debugging)"
    for root in (with_debug, without, both):
        for figure in root.all("figure"):
            marks = [p.text for p in figure.all("p") if "chip" in str(p.attributes.get("class"))]
            assert len(marks) == 1
            assert marks[0] in {mark.value for mark in Mark}
        assert "computed on data outside the guarantee" in root.by_id("chart-validation-loss").text
    assert "not_private" not in json.dumps(all_numbers(read_runs([plain])))
    assert all_numbers(read_runs([debugged]))["runs"][0]["final"]["not_private"]["nonfinite"] == 1


def test_whole_statement_is_shown(debugged):
    (block,) = [e for e in page_of(debugged).all("div") if e.attributes.get("class") == "statement"]
    assert block.text.split() == (debugged / "statement.txt").read_text().split()


def test_guarantee_is_one_sentence(debugged, tmp_path):
    sentence = guarantee_sentence(RunHistory(debugged))
    assert sentence.startswith(
        "ε = 8.0000 at δ = 1e-06, zero-out adjacency, Poisson sampling, accountant: privacy loss"
    )
    assert Decimal(calibrated(40).epsilon()) <= Decimal("8.0000")
    half = write_run(tmp_path / "half", records(taken=28))
    assert guarantee_sentence(RunHistory(half)).endswith("The run took 28 of 40 steps, which cost ε = 6.6927.")
    longer = write_run(tmp_path / "longer", records(steps=50))
    assert "does not hold: 50 steps were taken" in guarantee_sentence(RunHistory(longer))
    loud = write_run(tmp_path / "loud", records(), plan=calibrated(40).replace(noise_multiplier=0.0))
    assert guarantee_sentence(RunHistory(loud)).startswith("Not private")
    (found,) = json.loads(json.dumps(all_numbers([RunHistory(loud)]), allow_nan=False))["runs"]
    assert found["final"]["private"] is False
    assert found["final"]["epsilon"] is None


def test_guarantee_comes_from_the_plan_not_the_statement(debugged, tmp_path):
    before = guarantee_sentence(RunHistory(debugged))
    other = write_run(tmp_path / "other", records())
    (other / "statement.txt").write_text("NOT PRIVATE: epsilon = inf\nAccountant: nobody\n")
    assert guarantee_sentence(RunHistory(other)) == before
    (other / "statement.txt").write_text("Differentially private: epsilon = 0.1 at delta = 1e-9\n")
    assert guarantee_sentence(RunHistory(other)) == before


def test_sentence_replaces_a_chart_without_numbers(tmp_path):
    log = records()
    for record in log:
        if "released" in record:
            record["released"]["negative_fraction"] = None
    root = page_of(write_run(tmp_path / "scaled", log))
    assert "negative-fraction" not in plots(root)
    assert "Negative second moments ν̂: only variants that subtract" in root.text


def test_unlogged_steps_cost_epsilon_too(tmp_path):
    """Logged at step 10 of 40, stopped at 17: ε is that of 17 steps or more, never that of 10."""
    log = [record for record in records(taken=17) if record.get("step", 0) <= 10 or record["kind"] == "end"]
    run = RunHistory(write_run(tmp_path / "run", log))
    exact = calibrated(40).replace(steps=17).epsilon()
    assert run.epsilon_spent is not None
    assert exact <= run.epsilon_spent < calibrated(40).epsilon()


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_epsilon_is_never_rounded_down(epsilon):
    shown = Decimal(format_epsilon(epsilon))
    assert Decimal(epsilon) <= shown
    assert float(shown) <= epsilon * 1.01 + 1e-300


def test_hostile_text_is_escaped(tmp_path):
    log = records(debug=True)
    log[0] = start_record(40, versions={HOSTILE: HOSTILE}, device=HOSTILE, variant=HOSTILE, time=HOSTILE)
    log[-1]["reason"] = HOSTILE
    for record in log:
        if record["kind"] == "step":
            record["epsilon_note"] = HOSTILE
    recipe = f'task = "<img src=x onerror=alert(1)>"\nmodel = {json.dumps(HOSTILE)}\n"{"<b>"}" = "</pre><script>"\n'
    first = write_run(tmp_path / "<script>alert(2)<" / "first", log, recipe=recipe)
    second = write_run(tmp_path / "<i onclick=x>" / "first", log, recipe=recipe + "debug = true\n")
    (first / "statement.txt").write_text(f"{HOSTILE}: <script>\n  - </p><script>\n")
    for folders in ([first], [first, second]):
        root = page_of(*folders)
        assert {e.tag for e in root.everything()} <= {
            *("root", "html", "head", "meta", "title", "style", "body", "main", "button", "h1", "h2", "h3", "p", "i"),
            *("strong", "b", "details", "summary", "div", "dl", "dt", "dd", "small", "figure", "figcaption", "svg"),
            *("path", "text", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "pre", "wbr", "script"),
        }
        assert len(root.all("script")) == 1
        for element in root.everything():
            for name in element.attributes:
                assert not name.startswith("on")
                assert name not in ("src", "href", "style", "action")
        assert HOSTILE in root.text


def test_policy_allows_only_the_pages_own_script_and_style(debugged):
    root = page_of(debugged)
    (policy,) = [m.attributes["content"] for m in root.all("meta") if "http-equiv" in m.attributes]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (element,) = root.all(tag)
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert "://" not in page(read_runs([debugged]))


def test_noise_key_is_not_shown(debugged):
    (debugged.with_name("debugged.secret") / "noise.key").chmod(0o000)
    assert "the-secret-noise-key" not in page(read_runs([debugged])) + json.dumps(all_numbers(read_runs([debugged])))


def test_long_runs_are_thinned_but_keep_spikes(tmp_path):
    log = records(steps=3_000, debug=True)
    (spike,) = [record for record in log if record["kind"] == "step" and record["step"] == 1_503]
    spike["not_private"]["loss"] = 99.5
    folder = write_run(tmp_path / "long", log)
    output = write_report(read_runs([folder]), tmp_path / "long.html")
    assert output.stat().st_size < 1_500_000
    figure = parsed(output.read_text()).by_id("chart-training-loss")
    (row,) = [row for row in figure.rows() if "99.5" in row[1]]
    assert re.fullmatch(r"[\d.]+ \([\d.]+–99\.5\)", row[1])
    (band,) = [path for path in figure.all("path") if "band" in str(path.attributes["class"])]
    heights = [float(pair.split()[1]) for pair in re.findall(r"[\d.]+ [\d.]+", str(band.attributes["d"]))]
    assert min(heights) < 30  # near the top of a drawing whose plot begins at 25
    assert sum(height < 60 for height in heights) == 1


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 500), st.floats(-1e6, 1e6)), max_size=60), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_thinning_keeps_every_extreme(found, limit):
    series = [sorted(dict(one).items()) for one in found]
    rows = thin([[(step, [value] * 3) for step, value in one] for one in series], limit=limit)
    assert len(rows) <= limit
    for place, one in enumerate(series):
        fans = [row.fans[place] for row in rows if row.fans[place]]
        assert all(low <= value <= high for low, value, high in fans)
        if one:
            assert max(fan[-1] for fan in fans) == max(value for _, value in one)
            assert min(fan[0] for fan in fans) == min(value for _, value in one)
    for before, after in itertools.pairwise(rows):
        assert before.first <= before.last < after.first


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=9), st.booleans(), st.booleans())
def test_axis_contains_its_values(values, zero, log):
    found = axis(values, zero=zero, log=log)
    room = 1e-9 * max(1e-300, max(map(abs, values)))
    assert found.ticks[0] - room <= min(values)
    assert max(values) <= found.ticks[-1] + room
    assert found.ticks == sorted(set(found.ticks))
    assert 2 <= len(found.ticks) <= 12
    assert all(0 <= found.share(value) <= 1 for value in values)


def test_several_runs_share_charts_and_a_table(debugged, plain, tmp_path):
    third = write_run(tmp_path / "plain", records(taken=20, shift=-0.2), recipe=RECIPE.replace("0.001", "0.5"))
    runs = read_runs([debugged, plain, third])
    names = [run.name for run in runs]
    assert len(set(names)) == 3
    assert names[2].endswith("/plain")
    root = parsed(page(runs))
    figure = root.by_id("chart-validation-loss")
    assert [item.text for item in figure.all("li")] == names
    lines = [path for path in figure.all("path") if str(path.attributes["class"]).startswith("line")]
    assert [path.attributes["class"] for path in lines] == ["line c0", "line c1", "line c2"]
    head, *rows = root.by_id("finals").rows()
    for row, shift, step in zip(rows, (0.0, 0.3, -0.2), (40, 40, 20), strict=True):
        cells = dict(zip(head, row, strict=True))
        assert finite(cells["Validation loss"]) == pytest.approx(
            evaluation_record(step, 40, shift=shift)["loss"], rel=6e-6
        )
        assert cells["Steps"] == str(step)
    differences = root.by_id("differences").rows()
    assert differences == [["Setting", *names], ["learning_rate", "0.001", "0.001", "0.5"]]
    assert "cost more together" in root.text
    many = parsed(page([runs[0]] * 11))
    classes = {str(path.attributes["class"]) for path in many.by_id("plot-epsilon").all("path")}
    assert {"line c7", "line c0 dashed1", "line c2 dashed1"} <= classes


def test_truncated_log_is_reported(tmp_path):
    folder = write_run(tmp_path / "run", records(taken=12)[:-1])
    log = folder / "log.jsonl"
    whole = log.read_text()
    log.write_text(whole + json.dumps(step_record(13, 40, debug=False))[:70])
    run = RunHistory(folder)
    assert run.last_step == 12
    assert "was cut off while it was written" in run.notes[0]
    root = page_of(folder)
    assert "was cut off while it was written" in root.text
    assert "has not finished (still running, or killed)" in root.text
    log.write_text("rubbish\n" + whole)
    with pytest.raises(ValueError, match=r"log\.jsonl"):
        RunHistory(folder)


def test_resumed_run_is_one_curve(tmp_path):
    first = [record for record in records(taken=20) if record.get("step", 0) <= 12]  # as a resumed run cuts its log
    second = [record for record in records(shift=0.5) if record.get("step", 0) > 12]
    log = [*first, start_record(40, resumed_from=12), *second]
    run = RunHistory(write_run(tmp_path / "run", log))
    assert [row["step"] for row in run.steps] == list(range(1, 41))
    assert run.resumed_from == [12]
    losses = dict(all_numbers([run])["runs"][0]["curves"]["validation-loss"]["values"])
    assert losses[12] == pytest.approx(evaluation_record(12, 40)["loss"])
    assert losses[16] == pytest.approx(evaluation_record(16, 40, shift=0.5)["loss"])
    times = [record["seconds"] for record in run.steps]  # one end for two starts: from the steps
    assert run.seconds == pytest.approx(sum(times))
    assert "1 time(s), from step 12" in page_of(run.folder).by_id("details").text


def test_short_runs_are_shown(tmp_path):
    begun = write_run(tmp_path / "begun", [start_record(40)])
    root = page_of(begun)
    assert plots(root) == set()
    assert "Validation loss: not logged." in root.text
    one = write_run(tmp_path / "one", [start_record(40), step_record(1, 40, debug=False)])
    assert plots(page_of(one)) == ALL_PLOTS - DEBUG_ONLY - {"validation-loss", "validation-accuracy"}


def test_values_that_are_not_finite_are_not_drawn(tmp_path):
    odd: list[dict[str, Any]] = [
        {"kind": "step", "step": 1, "seconds": None, "epsilon": None},
        {"kind": "step", "step": 2, "seconds": None, "released": {"noise_to_signal": None}},
        {"kind": "step", "step": 3, "seconds": None, "released": {"noise_to_signal": 4.0}},
        {"kind": "step", "step": 6, "seconds": 0.5, "epsilon": 1.0},
        {"kind": "evaluation", "step": 6, "loss": None, "accuracy": None},
    ]
    odd[1]["released"]["scale_quantiles"], odd[2]["released"]["scale_quantiles"] = [1.0] * 6 + [None], [1.0] * 7
    folder = write_run(tmp_path / "odd", [start_record(40), *odd])
    found = all_numbers([RunHistory(folder)])["runs"][0]
    assert found["curves"]["seconds-per-step"]["values"] == [[6, 0.5]]
    assert "validation-loss" not in found["curves"]
    assert found["scale_quantiles"] == [[3, [1.0] * 7]]
    root = page_of(folder)
    assert "1 logged value(s) are not finite" in root.by_id("chart-epsilon").text
    assert "1 logged step(s) are not drawn, because the noise hides" in root.by_id("chart-noise-to-signal").text
    assert "nan" not in "".join(str(p.attributes["d"]) for p in root.all("path")).lower()


def test_all_numbers_are_json_and_match_the_log(debugged):
    found = json.loads(json.dumps(all_numbers(read_runs([debugged])), allow_nan=False))
    (run,) = found["runs"]
    log = [json.loads(line) for line in (debugged / "log.jsonl").read_text().splitlines()]
    steps = [record for record in log if record["kind"] == "step"]
    assert run["curves"]["epsilon"]["values"] == [[r["step"], r["epsilon"]] for r in steps]
    assert run["scale_quantiles"] == [[r["step"], r["released"]["scale_quantiles"]] for r in steps]
    assert run["curves"]["training-loss"]["mark"] == "not private: for debugging"
    assert run["final"]["epsilon"] == calibrated(40).epsilon()
    assert run["final"]["validation"]["loss"] == log[-2]["loss"]
    assert run["final"]["validation"]["best_step"] == 40
    assert run["recipe"]["learning_rate"] == 0.001


def test_file_is_written_atomically(debugged, tmp_path, monkeypatch):
    runs = read_runs([debugged])
    output = tmp_path / "report.html"
    output.write_text("older")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_report(runs, output)
    assert output.read_text() == "older"
    assert list(tmp_path.iterdir()) == [output]
    monkeypatch.undo()
    write_report(runs, output)
    assert output.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [output]
    with pytest.raises(ValueError, match=r"must end in \.html"):
        write_report(runs, debugged / "log.jsonl")


def test_ranges_and_ticks():
    (row,) = thin([[(1, [2.0] * 3), (2, [9.0] * 3), (3, [1.0] * 3)]], limit=1)
    assert (row.steps, row.fans) == ("1–3", [[1.0, 4.0, 9.0]])
    assert axis([0.0, 9.7]).ticks == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_format_number():
    assert [format_number(v) for v in (3.14159265, 12345678.0)] == ["3.14159", "12,345,678"]
    assert [format_number(v) for v in (0.1, 1234.5, 0.0)] == ["0.1", "1,234.5", "0"]


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        digits = colour.lstrip("#")
        digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_and_dark(debugged):
    style = page_of(debugged).all("style")[0].text
    themes = [dict(re.findall(r"--(\w+):(#\w+)", block)) for block in re.findall(r"color-scheme:[^}]*", style)]
    assert len(themes) == 3
    assert themes[1] == themes[2]
    assert themes[0] != themes[1]
    for theme in themes:
        for letters in ("text", "soft", "warn"):
            assert _contrast(theme[letters], theme["back"]) >= 4.5
            assert _contrast(theme[letters], theme["card"]) >= 4.5
        for place in range(8):
            assert _contrast(theme[f"c{place}"], theme["card"]) >= 1.9, place
        assert len({theme[f"c{place}"] for place in range(8)}) == 8
