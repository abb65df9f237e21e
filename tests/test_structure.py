"""The split that privacy rests on: imports point one way; only audited files can touch an un-noised gradient."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpoptim

PACKAGE = Path(dpoptim.__file__).parent
ORDER = ["noise", "privacy", "gradients", "optim", "theory", "training", "audit", "reproduce", "cli"]
BESIDE = {"opacus_compat": ["noise", "privacy", "gradients", "optim"]}  # what they may import; nothing imports them
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _without_types_only(tree: ast.Module) -> ast.Module:
    """The tree without `if TYPE_CHECKING:` blocks, which never run."""
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    return tree


MODULES = {module_name(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Every dpoptim module that a file names in an import."""
    found = set()
    for node in ast.walk(_without_types_only(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            if not members <= MODULES.keys():  # something beside submodules is taken from it
                found.add(node.module or "")
            found.update(members)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] == "dpoptim"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path):
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return
    before = BESIDE[parts[0]] if parts[0] in BESIDE else ORDER[: ORDER.index(parts[0])]
    allowed = [*before, parts[0], "version"]
    for name in imports_of(path):
        part = name.split(".")[1] if "." in name else None
        assert part in allowed, f"{module_name(path)} imports {name}"


TRAINING = ["support", "data", "losses", "models", "recipes", "runs"]  # each may import those to its left
FRONTS = ["comparison", "report", "hugging_face", "demo"]  # what people call: none imports another


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(PACKAGE / "training")], ids=module_name)
def test_the_parts_of_training_point_one_way(path):
    parts = path.relative_to(PACKAGE / "training").parts
    if len(parts) == 1:
        return
    before = TRAINING[: TRAINING.index(parts[0])] if parts[0] in TRAINING else TRAINING
    for name in imports_of(path):
        if name.startswith("dpoptim.training."):
            assert name.split(".")[2] in [*before, parts[0]], f"{module_name(path)} imports {name}"
    assert parts[0] in TRAINING + FRONTS


def test_no_import_circle():
    modules = {module_name(path): path for path in FILES}
    edges = {name: {i for i in imports_of(path) if i in modules and i != name} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail, name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


RELEASED_ONLY = {
    "dpoptim.gradients",
    "dpoptim.gradients.Captured",  # gives back losses, which a loop has anyhow
    "dpoptim.gradients.PrivateRelease",
    "dpoptim.gradients.Released",
    "dpoptim.gradients.end_to_end",  # a function of the tensors it is given, as the next
    "dpoptim.gradients.views_of",
}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "optim"], ids=module_name)
def test_the_optimizer_sees_released_values_alone(path):
    """No file of the optimizer imports the engine, the clipped sums or anything else un-noised."""
    touched = {name for name in imports_of(path) if name.startswith("dpoptim.gradients")}
    assert touched <= RELEASED_ONLY
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr != "grad", f"{path.name}:{node.lineno} reads a gradient off a parameter"
            private_of_another = node.attr.startswith("_") and not node.attr.startswith("__")
            assert not private_of_another or isinstance(node.value, ast.Name), f"{path.name}:{node.lineno} {node.attr}"
            assert node.attr not in ("counts_not_private", "_sums"), f"{path.name}:{node.lineno} {node.attr}"


FOR_USERS = {  # what anyone may call: losses, checks, public data
    "dpoptim.gradients.PublicGradients",
    "dpoptim.gradients.check_examples_do_not_mix",
    "dpoptim.gradients.linear_cross_entropy",
    "dpoptim.gradients.public_data",
}
EXCEPTIONS = {  # each with the reason why it sees nothing private, or says so
    "dpoptim.theory.probe": {"dpoptim.gradients.clipped_sum"},  # PUBLIC examples only
    "dpoptim.training.runs.identity": {"dpoptim.gradients.compiled_outer"},  # asks whether the loops in C are there
    "dpoptim.training.losses.token_losses": {  # asks which rule a layer has
        "dpoptim.gradients.layers",
        "dpoptim.gradients.layers.choose_rules",
        "dpoptim.gradients.layers.generic",
        "dpoptim.gradients.layers.generic.generic",
    },
}
BEYOND = [p for p in FILES if p.relative_to(PACKAGE).parts[0] in (*ORDER[ORDER.index("theory") :], *BESIDE)]


@pytest.mark.parametrize("path", BEYOND, ids=module_name)
def test_nothing_beyond_the_optimizer_touches_an_unnoised_gradient(path):
    allowed = RELEASED_ONLY | FOR_USERS | EXCEPTIONS.get(module_name(path), set())
    assert {name for name in imports_of(path) if name.startswith("dpoptim.gradients")} <= allowed
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("grad", "_sums"), f"{path.name}:{node.lineno} {node.attr}"
            counted = node.attr == "counts_not_private"
            assert not counted or module_name(path) == "dpoptim.training.runs.loop", f"{path.name}:{node.lineno}"


def test_twins_touch_nothing_of_the_fast_path():
    for path in (PACKAGE / "optim" / "twins").glob("*.py"):
        assert all(name.startswith("dpoptim.optim.twins") for name in imports_of(path)), path.name


def test_files_are_small():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path


def test_import_has_no_side_effect_on_torch():
    program = (
        "import torch; before = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed());"
        "import dpoptim;"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed())"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
