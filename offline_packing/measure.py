"""measure: source + sample encoder -> index.

A task is a part of a source and writes one part of the index and one of the set-aside table, so
that a run that was killed goes on after its last finished part. Images are not decoded: their size
is read from the header.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing import index
from offline_packing.config import ModelConfig
from offline_packing.errors import StageError
from offline_packing.files import read_json, remove_temporaries, to_json, write_atomically
from offline_packing.fingerprint import (
    Fingerprint,
    check_fingerprint,
    library_versions,
    warn_of_versions,
)
from offline_packing.index import Index, IndexInfo, MeasuredSample, SetAsideSample
from offline_packing.sources import Locator, Scan, Source, SourcePart, SourceRecord
from offline_packing.sources.records import to_sample
from offline_packing.stage import Stage, config_fingerprint, open_encoder, open_sources
from task_encoders.pack_format import image_extension
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.samples import SampleError
from task_encoders.vision import MAX_IMAGE_PIXELS, read_image_header

logger = logging.getLogger(__name__)

_REMEDY = (
    "set output.overwrite=true to make it anew, choose another output.path, "
    "or pass --accept-mismatch FIELD"
)


@dataclass(frozen=True)
class MeasureTask:
    """One part of one source, and where its two tables go."""

    number: int
    source: Source
    source_id: int
    part: SourcePart
    model: ModelConfig
    index_path: Path
    set_aside_path: Path


@dataclass(frozen=True)
class PartResult:
    """What a finished part holds."""

    number: int
    num_rows: int
    num_tokens: int
    set_aside: dict[str, int]


def measure(stage: Stage) -> IndexInfo:
    """Make the index, or return it if it is complete.

    Raises:
        StageError: an index of another fingerprint is there, or a source cannot be read.
    """
    workspace = stage.workspace
    sources = open_sources(stage.config)
    scans = [source.scan(stage.config.engine.samples_per_part) for source in sources]
    fingerprint = _fingerprint(stage, scans)
    info = _existing_index(stage, fingerprint)
    if info is not None:
        logger.info("measure: complete (%s samples), nothing to do", f"{info.num_samples:,}")
        return info
    workspace.index.mkdir(parents=True, exist_ok=True)
    workspace.set_aside.mkdir(parents=True, exist_ok=True)
    started = {**fingerprint, "engine.samples_per_part": stage.config.engine.samples_per_part}
    write_atomically(workspace.index / "started.json", to_json(started))
    remove_temporaries(workspace.index)
    remove_temporaries(workspace.set_aside)
    tasks = _tasks(stage, sources, scans)
    results = _run_tasks(stage, tasks)
    info = IndexInfo(
        fingerprint=dict(fingerprint),
        versions=library_versions(),
        part_rows=[result.num_rows for result in results],
        set_aside=dict(sum((Counter(result.set_aside) for result in results), Counter())),
        num_tokens=sum(result.num_tokens for result in results),
    )
    info = _with_unused_images(workspace.index, info, scans)
    if info.num_unused_images:
        logger.warning(
            "measure: %s image files are used by no sample", f"{info.num_unused_images:,}"
        )
    info.save(workspace.index_info)
    return info


def scan_counts(stage: Stage) -> list[int]:
    """Records (at most) in each source, for a dry run."""
    scans = [source.scan(4096) for source in open_sources(stage.config)]
    return [sum(part.num_records for part in scan.parts) for scan in scans]


def _fingerprint(stage: Stage, scans: Sequence[Scan]) -> Fingerprint:
    listings = {f"source.{i}.listing": scan.fingerprint for i, scan in enumerate(scans)}
    return {**config_fingerprint(stage.config), **listings}


def _existing_index(stage: Stage, fingerprint: Fingerprint) -> IndexInfo | None:
    """The complete index, if there is one; what cannot be used is refused, or removed."""
    workspace = stage.workspace
    info = IndexInfo.load(workspace.index_info)
    try:
        if info is not None:
            check_fingerprint(
                info.fingerprint,
                fingerprint,
                artifact=f"the index in {workspace.root}",
                remedy=_REMEDY,
                accept=stage.accept_mismatch,
            )
            warn_of_versions(info.versions, "the index")
            return info
        found = read_json(workspace.index / "started.json")
        if found is not None:
            # Parts made otherwise must not be mixed: nothing can be accepted here.
            parts = {"engine.samples_per_part": stage.config.engine.samples_per_part}
            check_fingerprint(
                found,
                {**fingerprint, **parts},
                artifact=f"the unfinished index in {workspace.root}",
                remedy="set output.overwrite=true to make it anew, or choose another output.path",
            )
    except StageError:
        if not stage.config.output.overwrite:
            raise
        logger.warning("measure: made otherwise before; overwriting")
        workspace.discard_index()
    return None


def _tasks(stage: Stage, sources: Sequence[Source], scans: Sequence[Scan]) -> list[MeasureTask]:
    parts = [(i, part) for i, scan in enumerate(scans) for part in scan.parts]
    return [
        MeasureTask(
            number,
            sources[source_id],
            source_id,
            part,
            stage.config.model,
            stage.workspace.index / index.part_name(number),
            stage.workspace.set_aside / index.part_name(number),
        )
        for number, (source_id, part) in enumerate(parts)
    ]


def _run_tasks(stage: Stage, tasks: Sequence[MeasureTask]) -> list[PartResult]:
    """Results in the order of the tasks; those of finished parts are read back."""
    results = {task.number: _finished_part(task) for task in tasks if task.index_path.exists()}
    remaining = [task for task in tasks if task.number not in results]
    if results and remaining:
        logger.info("measure: %d of %d parts are there already", len(results), len(tasks))
    total = sum(task.part.num_records for task in tasks)
    done = sum(result.num_rows + sum(result.set_aside.values()) for result in results.values())
    with stage.bar("measure", total, "sample") as bar:
        bar.update(done)
        for result in stage.engine.run(measure_part, remaining):
            results[result.number] = result
            bar.update(result.num_rows + sum(result.set_aside.values()))
    return [results[task.number] for task in tasks]


def _finished_part(task: MeasureTask) -> PartResult:
    num_tokens = pq.read_table(task.index_path, columns=["num_tokens"])["num_tokens"]
    reasons = pq.read_table(task.set_aside_path, columns=["reason"])["reason"].to_pylist()
    tokens = pc.sum(num_tokens).as_py() or 0
    return PartResult(task.number, len(num_tokens), tokens, dict(Counter(reasons)))


def measure_part(task: MeasureTask) -> PartResult:
    """Measure one part and write its two tables. The index part comes last: it marks the end."""
    encoder = open_encoder(task.model)
    max_image_pixels = task.model.max_image_pixels or MAX_IMAGE_PIXELS
    measured: list[MeasuredSample] = []
    aside: list[SetAsideSample] = []
    for record in task.source.records(task.part):
        key = task.source.key_prefix + record.key
        try:
            measured.append(
                measure_record(record, key, task.source, task.source_id, encoder, max_image_pixels)
            )
        except SampleError as error:
            aside.append(SetAsideSample(key, str(task.source.path), error.reason, error.detail))
        except Exception as error:
            raise StageError(
                f"sample {key!r} in {task.source.path}: {type(error).__name__}: {error}"
            ) from error
    index.write_table(task.set_aside_path, index.set_aside_table(aside))
    index.write_table(task.index_path, index.index_table(measured))
    tokens = sum(sample.length.num_tokens for sample in measured)
    reasons = Counter(sample.reason for sample in aside)
    return PartResult(task.number, len(measured), tokens, dict(reasons))


def measure_record(
    record: SourceRecord,
    key: str,
    source: Source,
    source_id: int,
    encoder: SampleEncoder,
    max_image_pixels: int,
) -> MeasuredSample:
    """One row of the index. Raises SampleError where the record is to be set aside."""
    if isinstance(record.content, SampleError):
        raise record.content
    sample = to_sample(record.content, key, source.task, record.paired_images)
    folder = source.image_folder(record.locator.container)
    media: list[tuple[Locator, str]] = []
    sizes: list[tuple[int, int]] = []
    for name in sample.images:
        container = source.media.locate(folder, name)
        with source.media.open(container) as file:
            header = read_image_header(file, max_image_pixels=max_image_pixels)
            size = file.seek(0, 2)
        extension = image_extension(container, header.format)
        media.append((Locator("file", container, 0, size), extension))
        sizes.append((header.height, header.width))
    length = encoder.measure(sample, sizes)
    return MeasuredSample(
        key, source_id, source.task, len(sample.turns), length, record.locator, tuple(media)
    )


def _with_unused_images(folder: Path, info: IndexInfo, scans: Sequence[Scan]) -> IndexInfo:
    """Count the image files that neither stand beside a record nor are named by a row."""
    unused = {(i, name) for i, scan in enumerate(scans) for name in scan.unpaired_images}
    if unused:
        table = Index(folder, info).table("source_id", "media")
        for source_id, media in zip(*(column.to_pylist() for column in table.columns), strict=True):
            unused.difference_update((source_id, image["container"]) for image in media)
    return IndexInfo(**{**vars(info), "num_unused_images": len(unused)})
