"""Reports of runs with hostile names, labels and texts, in Chromium: nothing runs or loads, and the page is whole."""

from __future__ import annotations

import csv
import http.server
import random
import shutil
import threading
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpoptim.app.report.page import write_report
from dpoptim.app.runs.run_log import read_runs
from tests.app.page_reader import parsed
from tests.app.report_runs import records, write_run
from tests.app.runs import rows_recipe
from tests.app.test_report_in_browser import BROWSER, chromium, probe
from tests.fuzz.commands import run
from tests.fuzz.kills import last_line
from tests.fuzz.parts import Failure, Outcome, each

CASES = 50
MISSING = "" if BROWSER else "Chromium is missing; install it with: apt-get install chromium"
# ACT leaves a mark in the page and calls the server, wherever it runs.
ACT = "document.documentElement.dataset.fuzz=1;new Image().src=`URL`"
HOSTILE = [
    f"<script>{ACT}</script>", f"</script><script>{ACT}</script>", f"<img src=URL onerror='{ACT}'>",
    f"\"'><svg onload='{ACT}'>", f"</title></style></textarea><script>{ACT}</script>", "<link rel=stylesheet href=URL>",
    f"<iframe srcdoc='<script>parent.{ACT}</script>'>", "<meta http-equiv=refresh content='0;url=URL'>",
    "<style>@import 'URL'; * {display: none}</style>", "<base href=URL>", f"javascript:{ACT}", "-->]]><!-- ",
    f"&lt;script&gt;{ACT}&#60;/script&#62;", "{{ 7 * 7 }} {% raw %}", "<details open ontoggle=alert(1)>", "<plaintext>",
    "\u202eevil\u2066\u202a", "\u200f\u200b\u2060\ufeff", "\x1b[2J\x1b]0;title\x07", "\x01\x08\x7f\x85\u2028\u2029",
    "e\u0301\u0327" * 40, "𝔘𝔫𝔦𝔠𝔬𝔡𝔢\U000e0041\ufffe", "\\u003cscript\\u003e \\x3c \\", "a\nb\r\nc\td", "W" * 3000,
    "\u4e2d" * 2000, "=cmd|' /C calc'!A0", "'''\"\"\" = [table]", "%s %n {0} ${x}", " ",
]  # fmt: skip


def outcomes(seed: int, cases: int, folder: Path) -> Iterator[tuple[int, Outcome]]:
    """Make and open the report of each seed; a server on this machine counts what pages load."""
    asked: list[str] = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    yield from each(partial(_case, folder, url, asked), range(seed, seed + cases))
    server.shutdown()


def _case(folder: Path, url: str, asked: list[str], seed: int) -> str:
    rng, tokens = random.Random(seed), list[str]()

    def hostile(*, for_path: bool = False) -> str:
        tokens.append(f"tok{len(tokens)}en")
        parts = [part.replace("URL", url) for part in rng.choices(HOSTILE, k=rng.randint(1, 3))]
        text = tokens[-1] + "".join(parts)
        return text.replace("/", "∕").encode()[:150].decode(errors="ignore") if for_path else text

    place = folder / str(seed)
    place.mkdir()
    trained = place / hostile(for_path=True)
    refusal = _train(place, trained, hostile)
    names = {name: hostile() for name in ("device", "mechanism", "variant")}
    log = records(debug=True)
    log[0] |= {**names, "versions": {hostile(): hostile()}}
    log[-1]["reason"] = hostile()
    recipe = "\n".join(f'setting_{number} = "{_toml(hostile())}"' for number in range(5))
    written = write_run(place / hostile(for_path=True), log, recipe=recipe)
    second = write_run(place / "plain", records(shift=0.2)) if refusal else trained
    file = write_report(read_runs([second, written]), place / "page.html")
    _check(place, file, asked, tokens[6:] if refusal else tokens)
    shutil.rmtree(place)
    return "dpoptim train refuses a name or label in one sentence; the other report is whole" if refusal else "whole"


def _train(place: Path, trained: Path, hostile: Any) -> bool:
    """Train on a table with hostile columns and labels; return whether that was refused."""
    columns, label, classes = [hostile(), hostile()], hostile(), [hostile(), hostile()]
    with (place / "hostile.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*columns, label])
        for one, two in np.random.default_rng(0).normal(size=(80, 2)):
            rows.writerow([one, two, classes[int(one + two > 0)]])
    limits = {name: {"center": 0, "scale": 1} for name in columns}
    more: dict[str, Any] = {"epsilon": None, "noise_multiplier": 1.0, "delta": 1e-3, "steps": 4, "device": "cpu"}
    recipe = rows_recipe(place, **more, evaluate_every=2, log_every=1).replace(
        data=str(place / "hostile.csv"), columns=limits, label_column=label
    )
    (place / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    status = run(["train", str(place / "recipe.toml"), "--run-dir", str(trained)], place / "printed")
    text = (place / "printed").read_bytes().decode(errors="replace")  # keeps "\r\n" in the name of the run
    if status not in (0, 2) or (status == 2 and not last_line(place / "printed").startswith("dpoptim: ")):
        raise Failure(f"dpoptim train ends with status {status}: {text[-300:]!r}")
    if "\x1b" in text.replace(str(trained), ""):
        raise Failure("dpoptim train writes a control character of the data to the terminal")
    return status == 2


def _toml(text: str) -> str:
    """The text inside the quotes of a TOML string."""
    return "".join(f"\\U{ord(c):08x}" if c in '"\\' or unicodedata.category(c) == "Cc" else c for c in text)


def _check(place: Path, page: Path, asked: list[str], tokens: list[str]) -> None:
    asked.clear()
    dom, console = chromium(place / "profile", page)
    root = parsed(dom.replace("<!DOCTYPE html>", ""))
    if "data-fuzz" in root.all("html")[0].attributes:
        raise Failure("a text of the run was executed")
    if console:
        raise Failure(f"the console is not empty: {console[:2]}")
    if missing := [token for token in tokens if token not in root.text]:
        raise Failure(f"not in the text of the page: {missing}")
    found, console = probe(place, page, width=360, dark=False)
    if asked:
        raise Failure(f"the page loads from outside: {asked[:3]}")
    if console or found["overflow"] > 0 or not all(plot["width"] > 200 < plot["width"] for plot in found["plots"]):
        raise Failure(f"the page is not whole: {console[:2]} {found}")
