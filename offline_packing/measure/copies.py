"""Samples that repeat earlier ones, found when all are measured.

A copy has the turns, system message, tools and media of an earlier sample of its source or of one
that is named before. Candidates have one `sample_hash`, which covers some bytes of each medium
only; they are read again and compared by all bytes:

    _packing/records/copies-00000.npy   128 bits per candidate of a part; removed at the end

Copies keep their row in the index, marked in its column `left_out`, and `plan` sets them aside.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.engines.local import advance
from offline_packing.index.rows import SampleIds, name_samples
from offline_packing.index.set_aside import find_duplicates
from offline_packing.index.shared import sort_equal
from offline_packing.index.table import COPY, DUPLICATE_KEY, Index, rewrite_part, with_left_out
from offline_packing.layouts.shard_tasks import COLUMNS, read_planned, wanted_table_rows
from offline_packing.measure.hashes import digest_sample
from offline_packing.runs.run import Run, open_sources
from offline_packing.runs.tasks import run_tasks
from offline_packing.sources import Source
from offline_packing.sources.reading.row_reader import rows_at_hand
from offline_packing.storage.files import load_array, write_atomically
from offline_packing.storage.paths import read_each


@dataclass(frozen=True)
class DigestTask:
    """Candidates of a part of the index, and the file of their digests."""

    number: int
    sources: tuple[Source, ...]
    rows: pa.Table
    path: Path
    unpack_folder: Path


def mark_repeated(run: Run, samples: Index) -> tuple[int, str]:
    """Mark copies in sources with `drop_copies`; and, where dialogues or parts will hide the key of
    an earlier record, the records that have it again. Returns how many other samples are copies, by
    their hashes, and the key of the first."""
    duplicates = find_duplicates(samples.array("key_hash"), partial(name_samples, samples))
    others = np.delete(np.arange(samples.info.num_samples), duplicates)
    order, is_later = sort_equal(samples.array("sample_hash")[others])
    drops = np.array([source.drop_copies for source in run.config.source])
    is_dropped = is_later & drops[samples.array("source_id")[others[order]]]
    codes = np.zeros(samples.info.num_samples, np.uint8)
    if run.config.regroups:
        codes[duplicates] = DUPLICATE_KEY
    if is_dropped.any():
        group = np.cumsum(~is_later)
        candidates = np.sort(others[order[np.isin(group, group[is_dropped])]])
        codes[_find_copies(run, samples, candidates, drops)] = COPY
    _mark(samples, codes)
    kept = np.sort(others[order[is_later & ~is_dropped]])
    return len(kept), name_samples(samples, kept[:1])["key"][0].as_py() if len(kept) else ""


def _find_copies(
    run: Run, samples: Index, candidates: SampleIds, drops: npt.NDArray[np.bool_]
) -> SampleIds:
    """Those of the candidates, ascending, that are left out."""
    folder = run.workspace.records
    folder.mkdir(exist_ok=True)
    ends = np.cumsum(samples.info.part_rows)
    parts = np.searchsorted(ends, candidates, side="right")
    paths = {number: folder / f"copies-{number:05d}.npy" for number in np.unique(parts).tolist()}
    there = {path.name for path in folder.iterdir()}
    left = [number for number, path in paths.items() if path.name not in there]
    sources = tuple(open_sources(run.config))

    def tasks() -> Iterator[DigestTask]:
        for number in left:
            own = candidates[parts == number] - (ends[number] - samples.info.part_rows[number])
            rows = samples.part(number, *COLUMNS).take(pa.array(own))
            yield DigestTask(number, sources, rows, paths[number], run.workspace.unpacked)

    with run.bar("compare", len(candidates), "sample") as bar:
        bar.update(int(np.count_nonzero(~np.isin(parts, left))))
        for _ in run_tasks(run, save_digests, tasks(), bar.update):
            pass
    digests = np.concatenate(list(read_each(folder, load_array, paths.values())))
    order, is_later = sort_equal(*digests.T)
    copies = candidates[order[is_later]]
    return copies[drops[samples.array("source_id")[copies]]]


def save_digests(task: DigestTask) -> None:
    """Save `digest_sample` of candidates of a part, (num_rows, 2). Raises StageError if a record or
    a medium changed after it was measured."""
    digests = []
    wanted = wanted_table_rows(task.rows, task.sources)
    with rows_at_hand(wanted, task.path.parent, task.unpack_folder):
        for record in read_planned(task.rows):
            source, num_images = task.sources[record.source_id], len(record.media)
            num_images -= record.num_videos
            sample = source.read_sample(record.key, record.json, num_images, record.num_videos)
            digests.append(digest_sample(sample, map(source.read_media, record.media)))
            advance()
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2))
    write_atomically(task.path, buffer.getvalue())


def _mark(samples: Index, codes: npt.NDArray[np.uint8]) -> None:
    """Set the column `left_out` to these codes, (num_samples,); parts that have them stay."""
    ends = np.cumsum(samples.info.part_rows)[:-1]
    for path, own, rows in zip(
        samples.paths, np.split(codes, ends), samples.parts("left_out"), strict=True
    ):
        if not np.array_equal(pc.fill_null(rows["left_out"], 0).to_numpy(), own):
            rewrite_part(path, partial(with_left_out, own))
