"""status: the progress of an output's stages."""

from collections.abc import Iterator
from typing import Any

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.table import IndexInfo
from offline_packing.layouts.shards import ShardFragment
from offline_packing.measure.measure_part import read_result
from offline_packing.report.report import report_status
from offline_packing.runs.artifacts import check_index, check_layout, check_plan
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.repair import is_repairing
from offline_packing.runs.run import Run, Workspace, listed
from offline_packing.storage.files import hash_file, read_each, read_json
from offline_packing.storage.receipts import Started
from task_encoders.storage.paths import REMEDY


def status(run: Run) -> str:
    """The progress of an output, as text; nothing is written, and a run may be active on it."""
    root = run.workspace
    lines = _status_of(root)
    manifest = read_manifest(root.root)
    if manifest is not None:
        counts = manifest.counts
        packs = sum(counts.packs.values())
        lines.append(
            f"complete: {counts.packed:,} samples in {packs:,} packs, "
            f"{len(manifest.shards):,} shards; set aside: {listed(counts.set_aside.items())}"
        )
    if is_repairing(root):
        lines.append(f"repair    run makes again what {root.damaged / 'found.json'} lists")
    written = report_status(root)
    if written is not None:
        lines.append(f"report    {written}")
    otherwise = list(_made_otherwise(run))
    if otherwise:
        lines += ["not what this configuration asks for:", *(f"  {text}" for text in otherwise)]
    return "\n".join(lines) + "\n"


def _made_otherwise(run: Run) -> Iterator[str]:
    """Settings that differ from a stage's artifacts, so that it would refuse them."""
    info, planned = IndexInfo.load(run.workspace.packing), run.workspace.read_plan()
    written = planned and run.workspace.written_with() and planned.facts.hash
    checks: Any = (
        (check_index, info and info.fingerprint),
        (check_plan, info and planned and planned.inputs),
        (check_layout, info and written),
    )
    for check, made in checks:
        try:
            if made:
                check(run, made)
        except StageError as error:
            yield str(error)


def _status_of(workspace: Workspace) -> list[str]:
    info, planned = IndexInfo.load(workspace.packing), workspace.read_plan()
    lines = [f"measure   {_measure_status(workspace, info)}"]
    path = workspace.plan / "plan.json"
    if planned is None or not path.exists():
        return [*lines, "plan      not done"]
    if not path.is_file() or hash_file(path) != planned.files.get(workspace.name_of(path)):
        raise DamagedError(f"{path} differs from what was planned; {REMEDY}")
    packs = read_json(path)["statistics"]["num_packs"]
    lines.append(f"plan      done: {packs:,} packs")
    failed = sorted(workspace.write.rglob("*.failed"))
    lines.append(f"write     {_write_status(workspace, packs)}, {len(failed):,} shards failed")
    return [*lines, *(f"  {path.stem}: {path.read_text()}" for path in failed)]


def _write_status(workspace: Workspace, num_packs: int) -> str:
    paths = sorted(workspace.write.rglob("*-??????.json"))
    fragments = read_each(workspace.write, ShardFragment.load, paths)
    written = [(fragment.num_packs, fragment.num_tokens) for fragment in fragments]
    packs, tokens = map(sum, zip(*written, strict=True)) if written else (0, 0)
    return f"{_of(packs, num_packs)} packs, {tokens:,} tokens in {len(written):,} shards"


def _of(done: int, total: int | None) -> str:
    """'1,200 of 4,000 (30%)'; only the first where the total is unknown."""
    return f"{done:,} of {total:,} ({done / total:.0%})" if total else f"{done:,}"


def _measure_status(workspace: Workspace, info: IndexInfo | None) -> str:
    if info is not None:
        aside = listed(info.set_aside.items())
        return f"done: {info.num_samples:,} samples, {info.num_tokens:,} tokens; set aside: {aside}"
    started = Started.load(workspace.packing, "measure")
    if started is None:
        return "not begun"
    finished = list(workspace.index.glob("part-*.parquet"))
    tables = [(path, workspace.set_aside / path.name) for path in finished]
    records = sum(one.num_records for one in read_each(workspace.packing, read_result, tables))
    of = started.total.get
    return f"{_of(records, of('records'))} records, {_of(len(finished), of('parts'))} parts"
