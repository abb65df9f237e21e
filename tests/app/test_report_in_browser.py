"""The report in headless Chromium: no console errors, every plot visible, readable on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dpoptim.app.report.charts import CURVES, format_number
from dpoptim.app.report.page import write_report
from dpoptim.app.runs.run_log import read_runs
from tests.app.page_reader import parsed
from tests.app.report_runs import evaluation_record, records, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed: apt-get install chromium"),
]

HARNESS = """<!DOCTYPE html><body><iframe id="f" width="WIDTH" height="800" src="PAGE"></iframe>
<pre id="found"></pre><script>
document.getElementById("f").addEventListener("load", function () {
  var inner = this.contentWindow, page = inner.document, root = page.documentElement, found = {};
  found.dark = inner.matchMedia("(prefers-color-scheme: dark)").matches;
  found.back = inner.getComputedStyle(page.body).backgroundColor;
  found.overflow = root.scrollWidth - root.clientWidth;
  page.querySelectorAll("details").forEach(function (each) { each.open = true; });
  found.overflow_open = root.scrollWidth - root.clientWidth;
  found.plots = Array.from(page.querySelectorAll("svg.plot")).map(function (plot) {
    var box = plot.getBoundingClientRect(), line = plot.querySelector(".line, .dots").getBoundingClientRect();
    var letters = Math.min.apply(null, Array.from(plot.querySelectorAll("text")).map(function (text) {
      return text.getBoundingClientRect().height;
    }));
    return { id: plot.id, width: box.width, height: box.height, drawn: line.width, letters: letters };
  });
  var figure = page.getElementById("chart-validation-loss"), plot = figure.querySelector("svg");
  var box = plot.getBoundingClientRect();
  plot.dispatchEvent(new inner.PointerEvent("pointermove", { clientX: box.right - 3, clientY: box.top + 50 }));
  found.readout = figure.querySelector(".readout").textContent;
  var left = Number(plot.dataset.left), right = Number(plot.dataset.right), shrink = box.width / 360;
  var middle = box.left + (left + 0.42 * (right - left)) * shrink;
  plot.dispatchEvent(new inner.PointerEvent("pointermove", { clientX: middle, clientY: box.top + 50 }));
  found.readout_middle = figure.querySelector(".readout").textContent;
  found.cursor = inner.getComputedStyle(plot.querySelector(".cursor")).visibility;
  plot.dispatchEvent(new inner.KeyboardEvent("keydown", { key: "Home" }));
  found.readout_home = figure.querySelector(".readout").textContent;
  page.getElementById("theme").click();
  found.back_after = inner.getComputedStyle(page.body).backgroundColor;
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


def chromium(profile: Path, page: Path, *options: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran, and what it wrote to the console."""
    assert BROWSER is not None
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"]
    command = [BROWSER, *fixed, "--allow-file-access-from-files", *options, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probe(folder: Path, page: Path, *, width: int, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """What a browser window of that width finds in the page."""
    harness = folder / f"harness-{page.stem}-{width}.html"
    harness.write_text(HARNESS.replace("WIDTH", str(width)).replace("PAGE", page.name))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom, console = chromium(folder / "profile", harness, scheme)
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    assert found is not None
    return json.loads(found.group(1)), console


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("browser")
    first = write_run(place / "first", records(debug=True))
    long = f'data = "/home/{"x" * 300}"\n{"y" * 99} = "{"z" * 99}"\n'
    second = write_run(place / f"second{'w' * 80}", records(shift=0.4, taken=24), recipe=long)
    long_note = {"kind": "start", "resumed_from": None, "versions": {"v" * 80: "1" * 80}, "device": "d" * 200}
    with (first / "log.jsonl").open("a") as log:
        log.write(json.dumps(long_note) + "\n")
    write_report(read_runs([first]), place / "one.html")
    write_report(read_runs([first, second]), place / "two.html")
    return place


def test_page_shows_the_numbers_of_the_run(folder):
    dom, console = chromium(folder / "profile", folder / "one.html")
    assert console == []
    root = parsed(dom.replace("<!DOCTYPE html>", ""))
    plots = {svg.attributes["id"] for svg in root.all("svg")}
    assert plots == {f"plot-{curve.name}" for curve in CURVES}
    rows = dict(root.by_id("chart-validation-loss").rows()[1:])
    assert rows == {str(step): format_number(evaluation_record(step, 40)["loss"]) for step in range(0, 41, 4)}
    assert format_number(evaluation_record(40, 40)["loss"]) in root.by_id("finals").text
    assert root.by_id("theme").text in ("Dark", "Light")
    assert "hidden" not in root.by_id("theme").attributes


@pytest.mark.parametrize(("name", "width", "dark"), [("one", 360, True), ("two", 360, False), ("two", 1200, True)])
def test_page_fits_and_responds_to_the_pointer(folder, name, width, dark):
    found, console = probe(folder, folder / f"{name}.html", width=width, dark=dark)
    assert console == []
    assert found["overflow"] <= 0
    assert found["overflow_open"] <= 0
    assert len(found["plots"]) == len(CURVES)
    for plot in found["plots"]:
        assert 270 <= plot["width"] <= 560, plot
        assert plot["height"] >= 150, plot
        assert plot["drawn"] >= 100, plot
        assert plot["letters"] >= 9, plot
    losses = [format_number(evaluation_record(step, 40)["loss"]) for step in (40, 0)]
    assert found["readout"] == (f"step 40: {losses[0]}" if name == "one" else f"step 40: first {losses[0]}")
    assert found["readout_middle"].startswith("step 16: ")
    assert found["readout_home"].startswith(
        f"step 0: {losses[1]}" if name == "one" else f"step 0: first {losses[1]} · "
    )
    assert found["cursor"] == "visible"
    light, night = "rgb(255, 255, 255)", "rgb(15, 18, 22)"
    assert found["dark"] is dark
    assert (found["back"], found["back_after"]) == ((night, light) if dark else (light, night))


def test_console_errors_are_caught(folder):
    """The policy refuses an unknown script, and the console reports it."""
    text = (folder / "one.html").read_text()
    (folder / "broken.html").write_text(text.replace("</main>", "</main><script>document.title = 'taken'</script>"))
    dom, console = chromium(folder / "profile", folder / "broken.html")
    assert len(console) == 1
    assert "Content Security Policy" in console[0]
    assert "<title>taken" not in dom


def test_page_works_without_script(folder):
    text = (folder / "one.html").read_text()
    (folder / "still.html").write_text(text.replace("<script>", "<script>// "))
    dom, _ = chromium(folder / "profile", folder / "still.html")
    root = parsed(dom.replace("<!DOCTYPE html>", ""))
    assert "hidden" in root.by_id("theme").attributes
    assert len(root.all("svg")) == len(CURVES)
