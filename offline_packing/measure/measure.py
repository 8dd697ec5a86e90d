"""measure: source + sample encoder -> index.

A task is a part of a source, see measure_part.py; a killed run resumes after its last
finished part.
"""

import itertools
import logging
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
    repeated_rows,
    set_known_keys,
    skip_fingerprint,
)
from offline_packing.measure.measure_part import (
    Cutting,
    MeasureTask,
    Measuring,
    PartResult,
    find_unreadable,
    measure_part,
    read_result,
)
from offline_packing.runs.artifacts import (
    check_index,
    config_fingerprint,
    library_versions,
    warn_of_versions,
)
from offline_packing.runs.run import Run, open_encoder, open_sources
from offline_packing.runs.source_files import count_unused_media, explain_listing, save_files
from offline_packing.runs.stage import Stage, Task, bring, is_complete
from offline_packing.runs.tasks import run_tasks
from offline_packing.sources import Locator, Scan, Source
from offline_packing.sources.reading.contents import nothing_found
from offline_packing.storage.files import atomic_file, hash_files, read_each, remove_folder
from offline_packing.storage.receipts import (
    Fingerprint,
    changed_fields,
    check_inputs,
    hash_of,
    receipt_path,
)
from offline_packing.storage.tars import member_size
from task_encoders.families import ModelOptions
from task_encoders.settings import explain_hash

logger = logging.getLogger(__name__)

#: Parts beyond this are slow on shared file systems.
MANY_PARTS: Final = 50_000
#: Records that a dry run measures.
_PREVIEWED: Final = 200
_TABLES: Final = attrgetter("index_path", "set_aside_path")


def measure(run: Run) -> Index:
    """Make the index, or return it if it is complete. Raises StageError as `bring`, or if a source
    cannot be read."""
    workspace = run.workspace
    receipt = bring(run, stage := Measure(run))
    info = IndexInfo.of(receipt, receipt_path(workspace.packing, stage.name))
    warn_of_versions(info.versions, "the index")
    return Index(workspace.index, info)


class Measure(Stage):
    """The index: one task per part of a source."""

    name = "measure"

    @cached_property
    def sources(self) -> list[Source]:
        """The sources, opened."""
        return open_sources(self.run.config)

    @cached_property
    def scans(self) -> list[Scan]:
        """The parts of each source: of its files, or of the index that holds its samples."""
        config = self.run.config
        scans = [
            source.scan(config.engine.samples_per_part)
            if source.options.index is None
            else scan_index(config, i)
            for i, source in enumerate(self.sources)
        ]
        for source, scan in zip(config.source, scans, strict=True):
            if not scan.parts:
                raise nothing_found(source.path, f"records of source.format={source.format}")
        return scans

    def inputs(self) -> Fingerprint:
        config = self.run.config
        listings = {f"source.{i}.listing": scan.fingerprint for i, scan in enumerate(self.scans)}
        skipped = {
            f"source.{i}.skip.listing": skip_fingerprint(source, config.pack.longest_sample)
            for i, source in enumerate(config.source)
            if source.outputs_skipped
        }
        described = {
            f"source.{i}.description.listing": source.description
            for i, source in enumerate(self.sources)
            if source.description
        }
        return {**config_fingerprint(config), **listings, **described, **skipped}

    def cut(self) -> Fingerprint:
        size = self.run.config.engine.samples_per_part
        return {"index.version": INDEX_VERSION, "engine.samples_per_part": size}

    def check(self, found: Fingerprint, *, repairs: bool, complete: bool) -> None:
        if repairs:
            check_index(self.run, found)  # not what a source has become since: what is there stays
            return
        root, wanted = self.run.workspace.root, self.inputs()
        artifact = f"the index in {root}"
        remedy, accept = self._remedy(found, wanted), self.run.accepted_fields
        if not complete:
            # Parts made with different settings must not be mixed: nothing can be accepted here.
            artifact, accept = f"the unfinished index in {root}", frozenset()
            wanted = {**wanted, **self.cut()}
            remedy = "set output.overwrite=true to rebuild it, or choose another output.path"
        how = self._explain
        check_inputs(found, wanted, artifact=artifact, remedy=remedy, accept=accept, explain=how)

    def _explain(self, name: str) -> str | None:
        workspace = self.run.workspace
        of_listing = explain_listing(workspace.files, self.sources, name)
        return of_listing or explain_hash(workspace.root, self.run.config.model, name)

    def _remedy(self, found: Fingerprint, wanted: Fingerprint) -> str:
        at, changed = self.run.workspace, changed_fields(found, wanted)
        is_listing = [re.fullmatch(r"source\.\d+(\.skip)?\.listing", name) for name in changed]
        is_grown = all(is_listing) and at.manifest.exists()
        new_data = (
            f"pack the new data into a separate output with source.skip={at.root} and another "
            "output.path, and blend both; or "
        )
        return (
            f"{new_data if is_grown else ''}set output.overwrite=true to rebuild it, choose "
            "another output.path, or pass --accept-mismatch FIELD"
        )

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    @cached_property
    def _tasks(self) -> Sequence[Task]:
        run, pack, layout = self.run, self.run.config.pack, self.run.config.output.layout
        LAYOUTS[layout].refuse(open_encoder(run.config.model).fingerprint)
        set_known_keys(run, self.sources, run.workspace.skip)
        cutting = None
        if run.config.splits:
            budgets = {str(name): limit for name, limit in pack.budgets.items()}
            limits = {"tokens": pack.longest_sample, **budgets}
            cutting = Cutting(pack.split_turns, limits)
        parts = [
            (i, self.sources[i], *part)
            for i, scan in enumerate(self.scans)
            for part in zip(scan.parts, shares_of_first(scan.parts), strict=True)
        ]
        tasks = []
        for number, (source_id, source, part, num_first) in enumerate(parts):
            folders = ("set_aside", "index")  # the index's part is written last
            files = tuple(f"_packing/{folder}/{index.part_name(number)}" for folder in folders)
            work = MeasureTask(
                number=number,
                source=source,
                source_id=source_id,
                part=part,
                model=run.config.model,
                index_path=run.workspace.root / files[1],
                set_aside_path=run.workspace.root / files[0],
                num_first=num_first,
                layout=layout,
                cutting=cutting,
            )
            tasks.append(Task(files, work))
        return tasks

    def total(self) -> Mapping[str, int | None]:
        known = [part.num_records for scan in self.scans for part in scan.parts]
        records = None if None in known else sum(filter(None, known))
        return {"parts": len(known), "records": records}

    def unreadable(self, finished: Sequence[Task]) -> Iterable[Path]:
        works = [task.work for task in finished]
        return filter(None, self.run.engine.run(find_unreadable, works))

    def make(self, tasks: Sequence[Task], folder: Path) -> None:
        run, at = self.run, self.run.workspace
        numbers = {task.work.number for task in tasks}
        before: list[Any] = []
        if folder == at.root:
            save_files(at.files, self.sources, self.scans)
            size, count = run.config.engine.samples_per_part, len(self.tasks())
            if count > MANY_PARTS and size < MANY_PARTS:
                advice = f"raise engine.samples_per_part {size:,}"
                logger.warning(
                    "measure: %s parts write several files each; %s", f"{count:,}", advice
                )
            before = [_TABLES(one.work) for one in self.tasks() if one.work.number not in numbers]
        with run.bar("measure", self.total()["records"], "record") as bar:
            results = read_each(at.index, read_result, before)
            bar.update(sum(result.num_records for result in results))
            works = [
                replace(work, index_path=folder / files[1], set_aside_path=folder / files[0])
                for files, work in tasks
            ]
            for _ in run_tasks(run, measure_part, run.engine.share(works), bar.update):
                pass
        if folder != at.root:
            remove_folder(at.skip)

    def finish(self, folder: Path) -> None:
        """Write which files were measured, and the rows of each part whose ids repeat."""
        packing = folder / "_packing"
        remove_folder(self.run.workspace.skip)
        if folder != self.run.workspace.root:
            save_files(packing / "files", self.sources, self.scans)
        (packing / "repeated").mkdir(parents=True, exist_ok=True)
        info = IndexInfo({}, {}, [one.num_rows for one in self._results()], {})
        for number, rows in enumerate(repeated_rows(Index(self.run.workspace.index, info))):
            if len(rows):
                path = packing / "repeated" / index.part_name(number)
                with atomic_file(path.with_suffix(".npy")) as file:
                    np.save(file, rows)

    def _results(self) -> list[PartResult]:
        tables = (_TABLES(task.work) for task in self.tasks())
        return list(read_each(self.run.workspace.index, read_result, tables))

    def record(self) -> tuple[dict[str, str], dict[str, Any]]:
        workspace, config, results = self.run.workspace, self.run.config, self._results()
        source_ids = [task.work.source_id for task in self.tasks()]
        for i, source in enumerate(config.source):
            of_source = [one for one, own in zip(results, source_ids, strict=True) if own == i]
            absent = {*getattr(source, "min_rating", ())}
            absent = absent.difference(*(one.rated for one in of_source))
            if absent and source.index is None and any(one.num_rows for one in of_source):
                raise StageError(
                    f"no record of {source.path} has {min(absent)!r}, which source.min_rating "
                    "names; correct the name, or leave it out"
                )
        counts = ((one.num_measured, one.diagnosis) for one in results)
        lost, answers = estimate(
            (source_id, *own) for source_id, own in zip(source_ids, counts, strict=True)
        )
        folders = (workspace.index, workspace.set_aside, workspace.files, workspace.repeated)
        files = {
            f"_packing/{at.name}/{name}": found
            for at in folders
            for name, found in hash_files(at, "*.npy" if at == folders[-1] else "*.parquet").items()
        }
        own = {"skip", "repeat", "weight", "index"}  # of this run, not of what it measures
        names = [prefix.removesuffix("/") for prefix in config.key_prefixes()]
        info = IndexInfo(
            fingerprint={},
            files=files,
            versions=library_versions(),
            part_rows=[result.num_rows for result in results],
            set_aside=dict(sum((result.set_aside for result in results), Counter())),
            lost=lost,
            num_tokens=sum(result.num_tokens for result in results),
            split=dict(sum((Counter(result.split) for result in results), Counter())),
            num_skipped=sum(result.num_skipped for result in results),
            num_weighted=sum(result.num_weighted for result in results),
            num_part_hashed=sum(result.num_part_hashed for result in results),
            source_warnings=[line for scan in self.scans for line in scan.warnings],
            sources=[
                one.model_dump(mode="json", exclude_defaults=True, exclude=own)
                | {"name": name or None}
                for one, name in zip(config.source, names, strict=True)
            ],
            source_parts=[len(scan.parts) for scan in self.scans],
        )
        samples = Index(workspace.index, info)
        copies, media = _count_copies(samples), most_shown(samples)
        common = {"copies": copies, "media": media, "answers": answers}
        info = replace(
            info,
            common={what: some for what, some in common.items() if some[0]},
            num_unused_images=count_unused_media(samples, self.scans),
        )
        return files, info.facts()

    def agrees(self, files: Mapping[str, str]) -> bool | None:
        planned = self.run.workspace.read_plan()
        return None if planned is None else planned.inputs.get("index") == hash_of(files)


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
    if (receipt := is_complete(run, stage := Measure(run))) is not None:
        info = IndexInfo.of(receipt, receipt_path(run.workspace.packing, stage.name))
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
