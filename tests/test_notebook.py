"""examples/first_packs.ipynb: it runs, and holds the outputs of a run."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from offline_packing import plan_packs
from task_encoders.packs.manifest import html_table

PATH = Path(__file__).parents[1] / "examples/first_packs.ipynb"


def outputs(notebook: Any) -> list[set[str]]:
    """The kinds of output of each code cell: printed, HTML, a picture. Warnings do not count."""
    return [
        {
            kind
            for output in cell.outputs
            if output.get("name") != "stderr"
            for kind in output.get("data", [output.get("name")])
        }
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_outputs_are_stored() -> None:
    stored = nbformat.read(PATH, 4)
    assert all(outputs(stored))
    assert not re.search(r"/tmp|/home|/root|site-packages", PATH.read_text())


@pytest.mark.exhaustive
def test_it_runs() -> None:
    notebook = nbformat.read(PATH, 4)
    stored = outputs(notebook)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": PATH.parent}}).execute()
    assert outputs(notebook) == stored
    printed = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    packed, control = map(float, re.findall(r"largest difference, .*: +(\S+)", printed))
    assert packed < 1e-4 < 1e-1 < control


def test_objects_show_themselves() -> None:
    shown = plan_packs([3, 4, 9], seq_length=8)._repr_html_()
    assert "1 of 8 tokens" in shown
    assert "set aside: over_seq_length" in shown


def test_tables_escape_what_data_hold() -> None:
    assert "&lt;b&gt;" in html_table("", {"<b>": "<b>"})
    assert "<b>" not in html_table("", {"<b>": "<b>"})
