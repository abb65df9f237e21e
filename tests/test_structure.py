"""The split that privacy depends on: imports go one way, and only audited subpackages see un-noised gradients."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import dpoptim
from tests import faults

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dpoptim.__file__).parent
ROOMS = [  # lowest first: a subpackage imports only from itself and those before it
    "kernels",
    "noise",
    "privacy",
    "data",
    "validation",
    "clipping",
    "optim",
    "theory",
    "integrations",
    "app",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Return every dpoptim module, or name in one, that a file imports, except under `if TYPE_CHECKING:`."""
    tree = ast.parse(path.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            if not members <= MODULES.keys():
                found.add(node.module or "")
            found.update(members)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] in ("dpoptim", "experiments")}


IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def room(name: str) -> str | None:
    return name.split(".")[1] if "." in name else None


def test_imports_point_one_way():
    wrong = []
    for name, imported in IMPORTS.items():
        own = room(name)
        if own in ROOMS:
            allowed = [*ROOMS[: ROOMS.index(own) + 1], "arguments", "disk_cache", "outlook", "short_repr", "version"]
            wrong += [f"{name} imports {other}" for other in imported if room(other) not in allowed]
    assert not wrong


def test_no_import_cycle():
    edges = {
        name: {other for other in imported if other in MODULES and other != name} for name, imported in IMPORTS.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join((*trail, name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


RELEASED_VALUES = {
    "dpoptim.clipping",
    "dpoptim.clipping.Captured",  # returns losses, which the loop already has
    "dpoptim.clipping.PrivateMechanism",
    "dpoptim.clipping.Released",
}
FOR_USERS = {  # losses, checks and public data
    "dpoptim.clipping.PublicGradients",
    "dpoptim.clipping.check_example_independence",
    "dpoptim.clipping.check_training_loss",
    "dpoptim.clipping.linear_cross_entropy",
    "dpoptim.clipping.public_data",
}
EXCEPTIONS = {  # each with the reason why it sees nothing private
    "dpoptim.theory.gradient_probe": {"dpoptim.clipping.clipped_sum"},  # public examples only
    "dpoptim.integrations.token_losses": {  # asks which rule a layer has
        "dpoptim.clipping.layers",
        "dpoptim.clipping.layers.choose_rules",
        "dpoptim.clipping.layers.generic",
        "dpoptim.clipping.layers.generic.generic",
    },
}
AFTER_CLIPPING = [name for name in MODULES if room(name) in ROOMS[ROOMS.index("clipping") + 1 :]]


def test_only_audited_rooms_touch_an_unnoised_gradient():
    """Later subpackages import only released values, and never read the gradient of a parameter."""
    wrong = []
    for name in AFTER_CLIPPING:
        in_optim = room(name) == "optim"
        allowed = RELEASED_VALUES | (set() if in_optim else FOR_USERS | EXCEPTIONS.get(name, set()))
        wrong += [f"{name} imports {i}" for i in IMPORTS[name] if i.startswith("dpoptim.clipping") and i not in allowed]
        forbidden = {"grad", "_sums"} if name == "dpoptim.app.runs.loop" else {"grad", "_sums", "counts_not_private"}
        for node in ast.walk(ast.parse(MODULES[name].read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in forbidden:
                wrong.append(f"{name}:{node.lineno} reads .{node.attr}")
            is_foreign_private = (
                in_optim
                and node.attr.startswith("_")
                and not node.attr.startswith("__")
                and not isinstance(node.value, ast.Name)
            )
            if is_foreign_private:
                wrong.append(f"{name}:{node.lineno} reads the private attribute .{node.attr}")
    assert not wrong


AUDITED_LINES = 8_435


def test_audited_rooms_keep_to_their_line_budget():
    """The audited code must not grow by accident. Searches for strategies cannot affect ε and do not count."""
    audited = [p for p in FILES if p.relative_to(PACKAGE).parts[0] in ("noise", "privacy", "clipping")]
    counted = [p for p in audited if p.parent.name != "search"]
    assert sum(len(path.read_text().splitlines()) for path in counted) <= AUDITED_LINES


def test_reference_optimizers_do_not_use_the_fast_path():
    for name, imported in IMPORTS.items():
        if name.startswith("dpoptim.optim.reference"):
            assert all(other.startswith("dpoptim.optim.reference") for other in imported), name


def test_every_deliberate_fault_applies():
    """Otherwise `python tests/faults.py` would show less than it claims."""
    stale = {
        fault.name: note for fault in faults.read_table(faults.TABLE) if (note := faults.find_text(fault, ROOT)[1])
    }
    assert not stale


def test_import_is_lazy_and_has_no_side_effect():
    """`import dpoptim` and `dpoptim --help` leave torch out; importing everything leaves torch's settings alone."""
    program = (
        "import sys, dpoptim; assert 'torch' not in sys.modules;"
        "import torch; before = (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed());"
        "[getattr(dpoptim, name) for name in dpoptim.__all__];"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed())"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
