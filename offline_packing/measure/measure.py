"""measure: source + sample encoder -> index.

A task is a part of a source, see measure_part.py; a killed run resumes after its last
finished part.
"""

import itertools
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from offline_packing.errors import StageError
from offline_packing.index import table as index
from offline_packing.index.records import (
    find_duplicates,
    most_shown,
    places_of_equal,
    record_numbers,
)
from offline_packing.index.rows import name_samples
from offline_packing.index.table import INDEX_VERSION, Index, IndexInfo
from offline_packing.layouts import LAYOUTS
from offline_packing.measure.diagnosis import estimate, shares_of_first
from offline_packing.measure.from_index import scan_index
from offline_packing.measure.identity import (
    NewRecords,
    first_of_equal,
    rename_repeated,
    set_known_keys,
    skip_fingerprint,
)
from offline_packing.measure.measure_part import (
    Cutting,
    MeasureTask,
    Measuring,
    find_unreadable,
    measure_part,
    read_result,
)
from offline_packing.measure.source_files import count_unused_media, explain_listing, save_files
from offline_packing.runs.artifacts import (
    changed_fields,
    check_fingerprint,
    check_index,
    config_fingerprint,
    library_versions,
    warn_of_versions,
)
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.repair import accept, is_repairing, refused, set_apart
from offline_packing.runs.run import Fingerprint, Run, Workspace, open_encoder, open_sources
from offline_packing.runs.tasks import check_all_done, done, run_tasks, unfinished
from offline_packing.sources import Locator, Scan, Source
from offline_packing.sources.reading.contents import nothing_found
from offline_packing.storage.files import (
    hash_file,
    hash_files,
    local_copy,
    read_each,
    read_json,
    remove_folder,
    remove_path,
    remove_temporaries,
    seal,
    to_json,
    write_atomically,
)
from offline_packing.storage.tars import member_size
from task_encoders.families import ModelOptions
from task_encoders.settings import explain_hash

logger = logging.getLogger(__name__)

#: Parts beyond this are slow on shared file systems.
MANY_PARTS: Final = 50_000
#: Records that a dry run measures.
_PREVIEWED: Final = 200
_MARKER: Final = attrgetter("index_path")
_TABLES: Final = attrgetter("index_path", "set_aside_path")


def measure(run: Run) -> Index:
    """Make the index, or return it if it is complete. Raises StageError if there is an index with
    another fingerprint, or a source cannot be read; or files of it are missing, and the source does
    not give them again."""
    workspace, overwrites = run.workspace, run.config.output.overwrite
    info = IndexInfo.load(workspace.index_info)
    if lost := _find_lost(workspace, info):
        try:
            return _restore(run, info, lost)
        except StageError:
            if not overwrites:
                raise
            run.discard_index()
    if info is not None and is_repairing(workspace) and not overwrites:
        check_index(run, info)  # not what a source has become since: what is there stays
        return Index(workspace.index, info)
    sources = open_sources(run.config)
    scans = _scan(run, sources)
    for config, scan in zip(run.config.source, scans, strict=True):
        if not scan.parts:
            raise nothing_found(config.path, f"records of source.format={config.format}")
    fingerprint, started = _fingerprint(run, scans), _started(run, scans)
    info = _existing_index(run, sources, scans)
    if info is not None:
        logger.info("measure: complete (%s samples), nothing to do", f"{info.num_samples:,}")
        return Index(workspace.index, info)
    set_known_keys(run, sources, workspace.skip)
    folders = (workspace.index, workspace.set_aside, workspace.files)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
    save_files(workspace.files, sources, scans)
    write_atomically(workspace.index_started, to_json(seal(started)))
    tasks = _tasks(run, sources, scans)
    if len(tasks) > MANY_PARTS and run.config.engine.samples_per_part < MANY_PARTS:
        advice = f"raise engine.samples_per_part {run.config.engine.samples_per_part:,}"
        logger.warning("measure: %s parts, each some files; %s", f"{len(tasks):,}", advice)
    _run_tasks(run, tasks)
    info = _complete(run, fingerprint, tasks, scans)
    info.save(workspace.index_info)
    remove_folder(workspace.skip)
    return Index(workspace.index, info)


def _scan(run: Run, sources: Sequence[Source]) -> list[Scan]:
    """The parts of each source: of its files, or of the index that holds its samples."""
    size = run.config.engine.samples_per_part
    return [
        source.scan(size) if source.options.index is None else scan_index(run.config, i)
        for i, source in enumerate(sources)
    ]


def _find_lost(workspace: Workspace, info: IndexInfo | None) -> list[Path]:
    """Files of a complete index that are not there: all but index.json are recorded in it."""
    if info is None:
        made_from_it = workspace.plan_info, workspace.started, workspace.manifest
        return [workspace.index_info] if any(path.exists() for path in made_from_it) else []
    paths = list(_recorded(workspace, info))
    there = set(done(paths, lambda path: path))
    return [path for path in paths if path not in there]


def _recorded(workspace: Workspace, info: IndexInfo) -> dict[Path, str]:
    """The hash of each file of an index."""
    folders = {workspace.packing / name: hashes for name, hashes in info.hashes.items()}
    return {folder / name: one for folder, own in folders.items() for name, one in own.items()}


def _restore(run: Run, info: IndexInfo | None, lost: Sequence[Path]) -> Index:
    """Measure lost files again, and accept them if they have the recorded hash: index.json by the
    plan, the others by index.json. Raises StageError otherwise."""
    workspace = run.workspace
    if run.engine.IS_SHARED:
        raise StageError(f"{lost[0]} is missing; run measure with engine.name=local")
    logger.info("measure: %d files are missing and made again, such as %s", len(lost), lost[0])
    if info is not None:
        hashes = _recorded(workspace, info)
        _measure_again(run, lost, keeps=True)
        accept(workspace, {path: hashes[path] for path in lost}, partial(_describe_change, run))
        return Index(workspace.index, info)
    recorded = (workspace.read_plan() or {"fingerprint": {}})["fingerprint"].get("index")
    manifest = read_manifest(workspace.root)
    # Nothing says any more which parts are whole: all are measured, if theirs are not.
    for keeps in (True, False) if recorded else (False,):
        info = _measure_again(run, lost, keeps=keeps)
        made_info = workspace.again / str(lost[0].relative_to(workspace.root))
        if manifest is not None:
            for own, source in zip(info.sources, manifest.config["source"], strict=True):
                own["path"] = source["path"]  # the data may have moved since
            info = replace(info, versions=manifest.library_versions)
            info.save(made_info)
        is_same = manifest is None or manifest.fingerprint == info.fingerprint
        if recorded == hash_file(made_info) or (recorded is None and is_same):
            hashes = _recorded(workspace, info)
            differ = [at for at, one in hashes.items() if not at.exists() or hash_file(at) != one]
            set_apart(workspace, differ)
            files = {path: hashes[path] for path in differ} | {lost[0]: hash_file(made_info)}
            accept(workspace, files, partial(_describe_change, run))
            return Index(workspace.index, info)
    raise refused(workspace, lost, _describe_change(run))


def _measure_again(run: Run, lost: Sequence[Path], *, keeps: bool) -> IndexInfo:
    """Make an index beside the one that has lost files, whose other parts it may keep. Raises
    StageError where the sources cannot be measured; the old files are back then."""
    workspace, output = run.workspace, run.config.output
    remove_folder(workspace.again)
    output = output.model_copy(update={"path": str(workspace.again), "overwrite": False})
    again = replace(run, config=run.config.model_copy(update={"output": output}))
    for index_path in workspace.index.glob("part-*.parquet") if keeps else ():
        paths = (index_path, workspace.set_aside / index_path.name)
        if all(path not in lost and path.exists() for path in paths):
            for path in paths:
                target = workspace.again / str(path.relative_to(workspace.root))
                target.parent.mkdir(parents=True, exist_ok=True)
                with local_copy(path) as copy:
                    shutil.copyfile(copy, target)
    try:
        return measure(again).info
    except StageError as error:
        raise refused(workspace, lost, error) from error


def _describe_change(run: Run) -> str:
    """Changes of the sources since they were measured, as far as their files show."""
    sources = open_sources(run.config)
    fields = [f"source.{i}.listing" for i in range(len(sources))]
    changes = [explain_listing(run.workspace.files, sources, name) for name in fields]
    paths = ", ".join(source.path for source in sources)
    return "; ".join(filter(None, changes)) or f"{paths} no longer gives what was measured"


def _complete(
    run: Run, fingerprint: Fingerprint, tasks: Sequence[MeasureTask], scans: Sequence[Scan]
) -> IndexInfo:
    """The content of index.json, once all records are measured."""
    workspace = run.workspace
    results = list(read_each(workspace.index, read_result, map(_TABLES, tasks)))
    counts = ((one.num_measured, one.diagnosis) for one in results)
    for i, source in enumerate(run.config.source):
        of_source = [one for one, task in zip(results, tasks, strict=True) if task.source_id == i]
        absent = {*getattr(source, "min_rating", ())}.difference(*(one.rated for one in of_source))
        if absent and source.index is None and any(one.num_rows for one in of_source):
            raise StageError(
                f"no record of {source.path} has {min(absent)!r}, which source.min_rating names; "
                "correct the name, or leave it out"
            )
    lost, answers = estimate(
        (task.source_id, *own) for task, own in zip(tasks, counts, strict=True)
    )
    own = {"skip", "repeat", "weight", "index"}  # of this run, not of what it measures
    names = [prefix.removesuffix("/") for prefix in run.config.key_prefixes()]
    info = IndexInfo(
        fingerprint=dict(fingerprint),
        versions=library_versions(),
        part_rows=[result.num_rows for result in results],
        set_aside=dict(sum((result.set_aside for result in results), Counter())),
        lost=lost,
        num_tokens=sum(result.num_tokens for result in results),
        split=dict(sum((Counter(result.split) for result in results), Counter())),
        num_skipped=sum(result.num_skipped for result in results),
        num_weighted=sum(result.num_weighted for result in results),
        num_part_hashed=sum(result.num_part_hashed for result in results),
        source_warnings=[line for scan in scans for line in scan.warnings],
        sources=[
            one.model_dump(mode="json", exclude_defaults=True, exclude=own) | {"name": name or None}
            for one, name in zip(run.config.source, names, strict=True)
        ],
        source_parts=[len(scan.parts) for scan in scans],
    )
    samples = Index(workspace.index, info)
    num_renamed = rename_repeated(samples)
    if num_renamed:
        logger.info(
            "measure: %s samples share their id with another one: ID@CONTENT", f"{num_renamed:,}"
        )
    common = {"copies": _count_copies(samples), "media": most_shown(samples), "answers": answers}
    folders = workspace.index, workspace.set_aside, workspace.files
    return replace(
        info,
        common={what: some for what, some in common.items() if some[0]},
        hashes={folder.name: hash_files(folder, "*.parquet") for folder in folders},
        num_unused_images=count_unused_media(samples, scans),
    )


def _count_copies(samples: Index) -> tuple[int, str]:
    """Number of records that repeat the texts and media of an earlier one, by their hashes, and the
    key of the first. Records with an earlier one's key are set aside, and not counted."""
    firsts = np.flatnonzero(np.diff(record_numbers(samples), prepend=-1))
    others = np.setdiff1d(firsts, find_duplicates(samples), assume_unique=True)
    hashes = samples.array("sample_hash")[others]
    several = places_of_equal(hashes)
    firsts = first_of_equal(hashes[several])
    copies = others[several[firsts != np.arange(len(several))]]
    return len(copies), name_samples(samples, copies[:1])["key"][0].as_py() if len(copies) else ""


def measure_first(source: Source, model: ModelOptions, count: int) -> list[Any]:
    """Measure a source's first records, and write nothing: rows of the index or of the set-aside
    table. Raises StageError as `measure`."""
    parts = source.unread_parts()
    records = itertools.chain.from_iterable(map(source.records, parts))
    task = MeasureTask(0, source, 0, parts[0], model, Path(), Path())
    return [*Measuring(task).rows(enumerate(itertools.islice(records, count)))]


def estimate_run(run: Run) -> str:
    """Estimate time and disk of a run from the first records of each source: they are measured, and
    their media read, as writing and verifying read them once each. Writes nothing."""
    lines, copies = [], run.config.output.media == "copy"
    open_encoder(run.config.model)  # takes seconds, once
    for source in open_sources(run.config):
        if source.options.index is not None or not (parts := source.unread_parts()):
            continue
        start = time.monotonic()
        rows = measure_first(source, run.config.model, _PREVIEWED)
        measured, held = time.monotonic(), 0
        for row in rows:
            media = [source.read_media(Locator(*one[:-1])) for one in row.get("media", ())]
            held += row["json"].size if "json" in row else 0
            held += sum(member_size(len(one)) for one in media) * copies
        took = measured - start + 2 * (time.monotonic() - measured)
        counts = [None if source.options.outputs_skipped else part.num_records for part in parts]
        each, total = ("every ", 1000) if None in counts else ("", sum(filter(None, counts)))
        share, workers = total / max(len(rows), 1), max(run.engine.workers, 1)
        seconds = took * share / workers
        lines.append(
            f"{source.path}: {each}{total:,} records take about {seconds:,.0f} s with "
            f"{workers} workers, and {held * share:,.0f} bytes of disk, as the first {len(rows)} do"
        )
    return "\n".join(lines)


def preview_measure(run: Run) -> str:
    """Describe what `measure` would do. Writes nothing, and reads no record without source.skip."""
    lines = []
    sources = open_sources(run.config)
    if run.workspace.index_info.exists():
        scans = _scan(run, sources)
        info = _existing_index(run, sources, scans, dry_run=True)
        if info is not None:
            return f"measure: complete ({info.num_samples:,} samples), nothing to do\n"
    with tempfile.TemporaryDirectory() as scratch:
        set_known_keys(run, sources, Path(scratch))
        for i, source in enumerate(sources):
            if source.options.index is not None:
                count = len(scan_index(run.config, i).parts)
                lines.append(f"would copy the index of {source.options.index} (parts: {count:,})\n")
                continue
            if source.known is not None:
                scan = source.scan(run.config.engine.samples_per_part)
                parts = [NewRecords(source, part) for part in scan.parts]
                text = f"{sum(1 for part in parts for _ in part):,} new records of {source.path}"
                text += f", and skip {sum(part.num_skipped for part in parts):,}"
            else:
                counts = [part.num_records for part in source.unread_parts()]
                text = f"{sum(filter(None, counts)):,} records of {source.path}"
                if None in counts:  # parts of unknown size are one file each
                    text = f"{counts.count(None):,} files of {source.path}"
            if run.config.splits:
                text += ", and cut conversations and documents that fit no pack"
            lines.append(f"would measure {text}\n")
    return "".join(lines)


def _fingerprint(run: Run, scans: Sequence[Scan]) -> Fingerprint:
    listings = {f"source.{i}.listing": scan.fingerprint for i, scan in enumerate(scans)}
    skipped = {
        f"source.{i}.skip.listing": skip_fingerprint(config, run.config.pack.longest_sample)
        for i, config in enumerate(run.config.source)
        if config.outputs_skipped
    }
    return {**config_fingerprint(run.config), **listings, **skipped}


def _started(run: Run, scans: Sequence[Scan]) -> Fingerprint:
    """Settings that all parts of an unfinished index must share."""
    return {
        **_fingerprint(run, scans),
        "index.version": INDEX_VERSION,
        "engine.samples_per_part": run.config.engine.samples_per_part,
    }


def _existing_index(
    run: Run, sources: Sequence[Source], scans: Sequence[Scan], *, dry_run: bool = False
) -> IndexInfo | None:
    """The complete index, if there is one; an index that cannot be used is refused, or removed."""
    workspace, fingerprint = run.workspace, _fingerprint(run, scans)

    def explain(name: str) -> str | None:
        of_listing = explain_listing(workspace.files, sources, name)
        return of_listing or explain_hash(workspace.root, run.config.model, name)

    info = IndexInfo.load(workspace.index_info)
    try:
        if info is not None:
            check_fingerprint(
                info.fingerprint,
                fingerprint,
                artifact=f"the index in {workspace.root}",
                remedy=_remedy(workspace, info.fingerprint, fingerprint),
                accept=run.accepted_fields,
                explain=explain,
            )
            warn_of_versions(info.versions, "the index")
            return info
        found = read_json(workspace.index_started, form=Fingerprint)
        if found is not None:
            # Parts made with different settings must not be mixed: nothing can be accepted here.
            check_fingerprint(
                found,
                _started(run, scans),
                artifact=f"the unfinished index in {workspace.root}",
                remedy="set output.overwrite=true to rebuild it, or choose another output.path",
                explain=explain,
            )
    except StageError:
        if not run.config.output.overwrite:
            raise
        if dry_run:
            return None
        logger.warning("measure: overwriting what was made with other settings")
        run.discard_index()
    return None


def _remedy(workspace: Workspace, found: Fingerprint, wanted: Fingerprint) -> str:
    changed = changed_fields(found, wanted)
    is_grown = all(name.endswith(".listing") for name in changed) and workspace.manifest.exists()
    new_data = (
        f"pack the new data into a separate output with source.skip={workspace.root} and another "
        "output.path, and blend both; or "
    )
    return (
        f"{new_data if is_grown else ''}set output.overwrite=true to rebuild it, choose another "
        "output.path, or pass --accept-mismatch FIELD"
    )


def _tasks(run: Run, sources: Sequence[Source], scans: Sequence[Scan]) -> list[MeasureTask]:
    at, model = run.workspace, open_encoder(run.config.model).fingerprint
    LAYOUTS[run.config.output.layout].refuse(model)
    layout, pack, cutting = run.config.output.layout, run.config.pack, None
    if run.config.splits:
        budgets = {str(name): limit for name, limit in pack.budgets.items()}
        limits = {"tokens": pack.longest_sample, **budgets}
        cutting = Cutting(pack.split_turns, limits)
    parts = [
        (i, sources[i], *part)
        for i, scan in enumerate(scans)
        for part in zip(scan.parts, shares_of_first(scan.parts), strict=True)
    ]
    return [
        MeasureTask(
            number=number,
            source=source,
            source_id=source_id,
            part=part,
            model=run.config.model,
            index_path=at.index / index.part_name(number),
            set_aside_path=at.set_aside / index.part_name(number),
            num_first=num_first,
            layout=layout,
            cutting=cutting,
        )
        for number, (source_id, source, part, num_first) in enumerate(parts)
    ]


def _run_tasks(run: Run, tasks: Sequence[MeasureTask]) -> None:
    """Measure the parts that are not measured yet."""
    if not run.engine.IS_SHARED:
        for path in filter(None, run.engine.run(find_unreadable, done(tasks, _MARKER))):
            logger.warning("measure: %s cannot be read; its part is made again", path)
            remove_path(path)
    left = unfinished("measure", tasks, _MARKER)
    numbers = {task.number for task in left}
    known = [task.part.num_records for task in tasks]
    total = None if None in known else sum(filter(None, known))
    whole = run.workspace.measure_total
    write_atomically(whole, to_json(seal({"parts": len(tasks), "records": total})))
    with run.bar("measure", total, "record") as bar:
        before = (_TABLES(task) for task in tasks if task.number not in numbers)
        results = read_each(run.workspace.index, read_result, before)
        bar.update(sum(result.num_records for result in results))
        for _ in run_tasks(run, measure_part, run.engine.share(left), bar.update):
            pass
    check_all_done(run, "measure", tasks, _MARKER)
    whole.unlink(missing_ok=True)
