"""report: index, plan and manifest -> report.html and report.json, as far as they are there.

_packing/report/report.html    one page for people, without anything outside it
_packing/report/report.json    the same figures
"""

from offline_packing.report.document import build_document, made_from
from offline_packing.report.report_page import render_page, verdict
from offline_packing.runs.run import Run
from offline_packing.runs.workspace import Workspace
from offline_packing.storage.files import read_json, to_json, write_atomically


def report(run: Run) -> str:
    """Write the report; returns what became of the samples, in one line.

    Raises:
        StageError: not even the index is complete, or a stage was made otherwise.
    """
    document = build_document(run)
    folder = run.workspace.report
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.html", render_page(document))
    write_atomically(folder / "report.json", to_json(document))
    return verdict(document)


def report_status(workspace: Workspace) -> str | None:
    """Where the report is, and whether it tells of the stages as they are; None without one."""
    document = read_json(workspace.report / "report.json")
    if document is None:
        return None
    current = made_from(workspace, read_json(workspace.manifest))
    old = "" if document["made_from"] == current else ", of an earlier state: run report again"
    return f"{workspace.report / 'report.html'}{old}"
