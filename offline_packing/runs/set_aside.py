"""Samples that are set aside: lists, and examples by reason. Too many of them stop a run: a folder
of pictures that has moved, or a wrong format, must not look like success."""

import csv
import io
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from offline_packing.config.packing import PackingConfig
from offline_packing.errors import StageError
from offline_packing.index.set_aside import AsideGroup, group_set_aside, read_set_aside
from offline_packing.index.table import Index, IndexInfo, part_name
from offline_packing.runs.run import Run, Workspace
from offline_packing.sources.lost_fields import UNUSED_MEDIA
from offline_packing.sources.reading.contents import hint_for

#: Reasons of samples that the configuration leaves out on purpose.
DELIBERATE: Final = frozenset(("not_drawn", "not_chosen", "trained"))
_DETAIL_LENGTH: Final = 160


def aside_while_measuring(workspace: Workspace, info: IndexInfo) -> list[Path]:
    """Return the paths of an index's set-aside tables."""
    num_parts = len(info.part_rows) if info.num_set_aside else 0
    return [workspace.set_aside / part_name(i) for i in range(num_parts)]


def aside_while_planning(workspace: Workspace) -> list[Path]:
    """Return the path of a plan's set-aside table, if there is one."""
    path = workspace.plan / "set_aside.parquet"
    return [path] if path.exists() else []


def render_examples(config: PackingConfig, groups: Iterable[AsideGroup]) -> str:
    """Render one example of each reason and source, with a hint, as lines."""
    lines = []
    for group in groups:
        lines.append(f"  {group.reason:<20} {group.count:>7,}  {_example(group)}")
        hint = _hint(config, group)
        if hint and group.reason not in DELIBERATE:
            lines.append(f"{'':<31}{hint}")
    return "".join(f"{line}\n" for line in lines)


def explain(config: PackingConfig, group: AsideGroup) -> str:
    """Render one example, with a hint, for an error message."""
    hint = _hint(config, group)
    return f"for example {_example(group)}{f'; {hint}' if hint else ''}"


def check_set_aside(run: Run) -> None:
    """Stop a run that is about to write less than its user expects.

    Raises:
        StageError: a source has no sample, or more are set aside than pack.max_set_aside allows; or
            samples lack the media that they are trained with: a source under captioning or vqa has
            none, unless it is plain text or source.text_only is set; or no source under bmr has
            any, and media were not used.
    """
    workspace, config, sources = run.workspace, run.config, run.config.source
    info, limit = IndexInfo.load(workspace.packing), config.pack.max_set_aside
    assert info is not None, "measured"
    samples, media = np.zeros((2, len(sources)), np.int64)
    for part in Index(workspace.index, info).parts("source_id", "num_images", "num_videos"):
        own, images, videos = (column.to_numpy() for column in part.columns)
        samples += np.bincount(own, minlength=len(sources))
        media += np.bincount(own, images + videos, len(sources)).astype(np.int64)
    tables = [*aside_while_measuring(workspace, info), *aside_while_planning(workspace)]
    groups = group_set_aside(tables) if limit < 1 else []
    lost = [group for group in groups if group.reason not in DELIBERATE]
    lost.sort(key=lambda group: -group.count)
    alive = {source.path for source, count in zip(sources, samples, strict=True) if count}
    for path in (group.source for group in lost):
        if path not in alive:
            of_source = [group for group in lost if group.source == path]
            raise StageError(
                f"source {path!r} yields no sample, all are set aside: {_counts(of_source)}; "
                f"{explain(config, of_source[0])}; fix it, remove it, or go on with "
                "pack.max_set_aside=1; set-aside lists them"
            )
    num_lost = sum(group.count for group in lost)
    num_samples = info.num_samples + info.num_set_aside + num_lost - sum(g.count for g in groups)
    if lost and (share := num_lost / num_samples) > limit:
        enough = math.ceil(share * 1000) / 1000
        raise StageError(
            f"{num_lost:,} of {num_samples:,} samples ({share:.1%}) are set aside, more than "
            f"pack.max_set_aside={limit:g}: {_counts(lost)}; {explain(config, lost[0])}; fix the "
            f"source, or go on with pack.max_set_aside={enough:g}; set-aside lists them"
        )
    unused = [line for line in info.warnings if UNUSED_MEDIA in line]
    if config.task == "bmr" and (media.any() or not unused):
        return
    for source, count in zip(sources, np.where(media, 0, samples).tolist(), strict=True):
        if count and not source.text_only and source.format != "text":
            raise StageError(
                f"none of the {count:,} samples of {source.path!r} has an image or a video under "
                f"task {source.task}{''.join(f'; {line}' for line in unused[:3])}; say where they "
                "are with source.fields, such as {images: FIELD}, or go on with "
                "source.text_only=true"
            )


def _counts(groups: Iterable[AsideGroup]) -> str:
    counts: Counter[str] = Counter()
    for group in groups:
        counts[group.reason] += group.count
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())


def _example(group: AsideGroup) -> str:
    detail = " ".join(group.detail.split())
    cut = f"{detail[: _DETAIL_LENGTH - 1]}…" if len(detail) > _DETAIL_LENGTH else detail
    return f"{group.key!r} in {group.source}: {cut}"


def _hint(config: PackingConfig, group: AsideGroup) -> str | None:
    sources = [one for one in config.source if one.path == group.source]
    return hint_for(group.reason, group.detail, sources[0]) if sources else None


def list_set_aside(
    run: Run, *, reasons: Collection[str] = (), as_csv: bool = False
) -> Iterator[str]:
    """Yield lines of key, source, reason and detail, many at a time, of samples that `measure` and
    then `plan` set aside, for these reasons or all. CSV has a header and is quoted by RFC 4180;
    other lines have tabs. Raises StageError if nothing is measured yet, or a table is damaged."""
    workspace = run.workspace
    info = IndexInfo.load(workspace.packing)
    if info is None:
        raise StageError(f"no complete index in {workspace.root}; run measure first")
    paths = [*aside_while_measuring(workspace, info), *aside_while_planning(workspace)]
    if as_csv:
        yield "key,source,reason,detail\n"
    for table in read_set_aside(paths, reasons):
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        if as_csv:
            buffer = io.StringIO()
            csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
            yield buffer.getvalue()
        else:
            yield "".join("\t".join(" ".join(text.split()) for text in row) + "\n" for row in rows)
