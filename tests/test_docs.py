"""The documentation: public names have docstrings and API pages, links work, and paragraphs are short."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
API = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md"))
ROOMS = ["privacy", "noise", "data", "validation", "clipping", "optim", "theory", "app", "app.audit"]
INTEGRATIONS = [f"integrations.{name}" for name in ("hugging_face", "accelerate", "opacus", "sklearn")]
LONGEST_PARAGRAPH = 620  # characters: about five lines


def parse(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def docstring(module: str, name: str) -> str | None:
    """Return the docstring of a name, following imports inside the package; for assignments, the string below."""
    tree = parse(module)
    for node in ast.walk(tree):  # `if TYPE_CHECKING:` has imports too
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            if not (node.module or "").startswith("dpoptim"):
                return f"`{name}`" if f"`{name}`" in (ast.get_docstring(tree) or "") else None
            return docstring(node.module or "", name)
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(below.value) if isinstance(below, ast.Expr) else None
    raise LookupError(f"{module} does not define {name}")


def public_names(module: str) -> list[str]:
    (names,) = [n for n in parse(module).body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    return list(ast.literal_eval(names.value))


@pytest.mark.parametrize("name", [*ROOMS, *INTEGRATIONS])
def test_public_names_are_documented(name):
    """An API page renders everything in `__all__` that has a docstring."""
    assert f"::: dpoptim.{name}\n" in API, "no API page"
    assert ast.get_docstring(parse(f"dpoptim.{name}"))
    assert not [public for public in public_names(f"dpoptim.{name}") if not docstring(f"dpoptim.{name}", public)]


def test_top_level_names_are_in_the_index():
    text = (DOCS / "api" / "index.md").read_text(encoding="utf-8")
    assert not [name for name in public_names("dpoptim") if f"`{name}`" not in text]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paragraphs(page):
    text = prose(page)
    broken = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" not in target:
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{target}#{anchor}")
    assert not broken
    if "begin tinybert" not in text:  # a generated page has its own style
        plain = [
            part for part in re.split(r"\n\s*\n", text) if not re.match(r"\s*(\||#|-|\*|\d\.|    |<!--|:::)", part)
        ]
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
