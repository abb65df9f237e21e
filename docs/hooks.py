"""MkDocs hooks: pages from the repository's root, notebooks, links out of docs/, and a check of the API reference."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/dpoptim/dpoptim/blob/main/"
FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root and the notebooks."""
    for page, name in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=as_markdown(notebook)))
    return files


def as_markdown(notebook: Path) -> str:
    """Return a notebook as a page: its text, its code, and the outputs that are stored in it."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                png = data["image/png"].strip()
                parts.append(f'<img class="output" alt="What the code draws" src="data:image/png;base64,{png}">')
            else:
                parts.append("```{ .text .output .no-copy }\n" + "".join(data["text/plain"]).rstrip() + "\n```")
    title, *rest = parts
    download = f'<a href="{notebook.name}" download>Download this notebook</a>'
    return "\n\n".join([title, download, *rest])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs/ at the repository, and links to docs/ from the root at the site."""
    uri = page.file.src_uri
    home = "" if uri in FROM_ROOT else posixpath.join("docs", posixpath.dirname(uri))
    pages = {name: page for page, name in FROM_ROOT.items()}

    def rewrite(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(home, match[2]))
        if target in pages:
            inside = pages[target]
        elif target.startswith("docs/"):
            inside = re.sub(r"\.ipynb$", ".md", target.removeprefix("docs/"))
        elif (ROOT / target).exists():
            return f"{match[1]}{SOURCE}{target}{match[3] or ''})"
        else:
            return match[0]  # MkDocs reports it as broken
        return f"{match[1]}{posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{match[3] or ''})"

    return LINK.sub(rewrite, markdown)


def public_names(module: str) -> list[str]:
    """Return `__all__` of a module, read from its source."""
    path = ROOT / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise PluginError(f"{path} has no __all__")


def on_post_build(config: Any) -> None:
    """Fail if a public name of a documented module is missing: it is not rendered if it has no docstring."""
    missing = []
    for source in sorted((ROOT / "docs" / "api").glob("*.md")):
        html = Path(config["site_dir"], "api", f"{source.stem}.html").read_text(encoding="utf-8")
        found = re.search(r"^::: ([\w.]+)$", source.read_text(encoding="utf-8"), re.MULTILINE)  # the page's module
        if found:
            module = found[1]
            for name in public_names(module):
                shown = (
                    f'id="{module}.{name}"',
                    f'id="{module}.{name}.{name}"',  # a function with the name of its module
                    f"<code>{name}</code>",  # a name of torch, which the page mentions
                )
                missing += [] if any(text in html for text in shown) else [f"{module}.{name}"]
    if missing:
        raise PluginError(f"public names without a docstring: {', '.join(missing)}")
