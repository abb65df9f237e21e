"""Execute the notebooks of the documentation, and store their outputs.

    python -m tests.notebooks                              # all of them; a minute or two
    python -m tests.notebooks docs/notebooks/table.ipynb

The site shows stored outputs, because it is built without torch. A stored notebook has no traces of the machine, and a
digest of its code, so that outputs of other code are noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> NotebookNode:
    """Return the notebook with new outputs; its files are removed. A cell that fails raises CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in the folder: TCP ports may be taken by other tests.
        own = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        place = {"metadata": {"path": folder}}
        client = NotebookClient(
            notebook, config=own, resources=place, kernel_name="python3", timeout=600, coalesce_streams=True
        )
        client.execute(env={**os.environ, "TMPDIR": folder})
    return notebook


def stored(notebook: NotebookNode) -> str:
    """Return the file of a notebook: code, text, outputs and tags, without times, versions and warnings."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell.execution_count = number
        cell.metadata = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    digest = hashlib.sha256(json.dumps([cell.source for cell in code]).encode()).hexdigest()[:16]
    notebook.metadata = {"code": digest, "kernelspec": KERNEL, "language_info": {"name": "python"}}
    return nbformat.writes(nbformat.from_dict(notebook)) + "\n"


def main() -> None:
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        path.write_text(stored(execute(path)), encoding="utf-8")
        print(f"stored {path.name}")


if __name__ == "__main__":
    main()
