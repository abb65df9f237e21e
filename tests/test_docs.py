"""The documents: public names have docstrings and API pages, links lead somewhere, paragraphs are short."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
API = {page: re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M) for page in DOCS.glob("api/*.md")}
ROOMS = ["privacy", "noise", "data", "clipping", "optim", "theory", "app"]
INTEGRATIONS = [f"integrations.{name}" for name in ("hugging_face", "accelerate", "opacus")]
LONGEST_PARAGRAPH = 620  # characters: about five lines


@pytest.mark.parametrize("name", [*ROOMS, *INTEGRATIONS])
def test_public_names_are_documented(name):
    """An API page renders everything in `__all__` that has a docstring."""
    assert f"dpoptim.{name}" in sum(API.values(), []), "no API page"
    module = importlib.import_module(f"dpoptim.{name}")
    assert module.__doc__
    assert not [public for public in module.__all__ if not getattr(module, public).__doc__]


def test_top_level_names_are_in_the_index():
    import dpoptim

    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    assert not [name for name in dpoptim.__all__ if f"`{name}`" not in text]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paragraphs(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" not in target:
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{target}#{anchor}")
    assert not broken
    if "begin tinybert" not in text:  # a generated page has its own style
        plain = [part for part in re.split(r"\n\s*\n", text) if not re.match(r"\s*(\||#|-|\*|\d\.|    |<!--|:::)", part)]
        assert not [part for part in plain if len(part) > LONGEST_PARAGRAPH]


def test_the_threat_model_names_files_and_tests_that_exist():
    rows = re.findall(r"^\| \d+ \| .+$", (DOCS / "threat-model.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 30
    missing = []
    for row in rows:
        *_, files, tests, _ = row.split("|")
        for column, home in ((files, ROOT / "src" / "dpoptim"), (tests, ROOT / "tests")):
            names = [name.replace("HF/", "integrations/hugging_face/") for name in re.findall(r"`([^`]+)`", column)]
            missing += [name for name in names if not (home / name).exists()]
    assert not missing


def test_the_version_has_one_source():
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
