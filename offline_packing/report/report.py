"""report: index, plan and manifest -> report.html and report.json, as far as they exist.

_packing/report/report.html    one self-contained page for people
_packing/report/report.json    the same figures
"""

from offline_packing.report.document import Document, build_document, made_from
from offline_packing.report.pages import render_report
from offline_packing.runs.run import Run
from offline_packing.runs.workspace import Workspace
from offline_packing.storage.files import read_json, to_json, write_atomically


def report(run: Run) -> str:
    """Write the report; returns what became of the samples, in one line.

    Raises:
        StageError: not even the index is complete, or a stage was made with other settings.
    """
    document = build_document(run)
    folder = run.workspace.report
    folder.mkdir(parents=True, exist_ok=True)
    line = verdict(document)
    write_atomically(folder / "report.html", render_report(document, line))
    write_atomically(folder / "report.json", to_json(document))
    return line


def verdict(document: Document) -> str:
    """What became of the samples, in one line."""
    samples, plan = document["samples"], document["plan"]
    if plan is None:
        usable = samples["found"] - samples["set_aside"]
        return (
            f"{samples['found']:,} samples = {usable:,} measured + {samples['set_aside']:,} set "
            "aside; no packs yet: run plan"
        )
    above = plan["packs"] - plan["lower_bound"]
    line = (
        f"{samples['found']:,} samples = {samples['packed']:,} packed + "
        f"{samples['set_aside']:,} set aside; {plan['packs']:,} packs, "
        f"{above:,} above the lower bound; {plan['fill']:.2%} full"
    )
    return line if document["stages"]["write"] else f"{line}; not written yet: run write"


def report_status(workspace: Workspace) -> str | None:
    """Where the report is, and whether it is up to date with the stages; None without one."""
    document = read_json(workspace.report / "report.json")
    if document is None:
        return None
    current = made_from(workspace, read_json(workspace.manifest))
    old = "" if document["made_from"] == current else ", out of date: run report again"
    return f"{workspace.report / 'report.html'}{old}"
