"""Progress of an output's stages."""

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
from offline_packing.runs.run import PlanReceipt, Run, Workspace, listed
from offline_packing.storage.files import hash_file, read_each, read_json
from offline_packing.storage.receipts import Started
from task_encoders.storage.paths import REMEDY


def status(run: Run) -> str:
    """Describe the progress of an output. Nothing is written, and a run may be active on it."""
    root = run.workspace
    info, planned = IndexInfo.load(root.packing), root.read_plan()
    lines = [f"measure   {_measure_status(root, info)}", *_plan_status(root, planned)]
    if (manifest := read_manifest(root.root)) is not None:
        counts = manifest.counts
        packs = sum(counts.packs.values())
        lines.append(
            f"complete: {counts.packed:,} samples in {packs:,} packs, "
            f"{len(manifest.shards):,} shards; set aside: {listed(counts.set_aside.items())}"
        )
    if is_repairing(root):
        lines.append(f"repair    run makes again what {root.damaged / 'found.json'} lists")
    if (written := report_status(run, manifest)) is not None:
        lines.append(f"report    {written}")
    made = planned and root.written_with() and planned.facts.hash
    checks: Any = (
        (check_index, info and info.fingerprint),
        (check_plan, info and planned and planned.inputs),
        (check_layout, info and made),
    )
    otherwise = []
    for check, made_with in checks:
        try:
            if made_with:
                check(run, made_with)
        except StageError as error:
            otherwise.append(f"  {error}")
    if otherwise:
        lines += ["not what this configuration asks for:", *otherwise]
    return "\n".join(lines) + "\n"


def _plan_status(workspace: Workspace, planned: PlanReceipt | None) -> Iterator[str]:
    path = workspace.plan / "plan.json"
    if planned is None or not path.exists():
        yield "plan      not done"
        return
    if not path.is_file() or hash_file(path) != planned.files.get(workspace.name_of(path)):
        raise DamagedError(f"{path} differs from what was planned; {REMEDY}")
    num_packs = read_json(path)["statistics"]["num_packs"]
    yield f"plan      done: {num_packs:,} packs"
    paths = sorted(workspace.write.rglob("*-??????.json"))
    shards = list(read_each(workspace.write, ShardFragment.load, paths))
    packs = sum(len(shard.packs) for shard in shards)
    tokens = sum(shard.num_tokens for shard in shards)
    failed = sorted(workspace.write.rglob("*.failed"))
    yield (
        f"write     {_of(packs, num_packs)} packs, {tokens:,} tokens in {len(shards):,} shards, "
        f"{len(failed):,} shards failed"
    )
    yield from (f"  {path.stem}: {path.read_text()}" for path in failed)


def _of(done: int, total: int | None) -> str:
    """Render '1,200 of 4,000 (30%)', or '1,200' if the total is unknown."""
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
