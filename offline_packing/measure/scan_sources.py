"""The sources of a configuration, listed: all that they hold, or what is new in them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offline_packing.config.packing import SourceConfig
from offline_packing.measure.measured_files import (
    describe_changes,
    files_path,
    find_growth,
    list_files,
    save_files,
)
from offline_packing.runs.generations import Generation, earlier_generations
from offline_packing.runs.run import Stage, open_sources
from offline_packing.sources import Growth, Scan, Source


@dataclass(frozen=True)
class ScannedSource:
    """A source, the parts to be measured, and the files that they lie in."""

    source: Source
    scan: Scan
    #: a table of measured_files.FILES_SCHEMA, packed: a scan of its own takes room enough
    files: bytes


def scan_sources(stage: Stage, samples_per_part: int) -> list[ScannedSource]:
    """List the sources of a stage; where it appends, what earlier generations did not measure.

    Raises:
        StageError: a source cannot be read, or a file that was measured is gone or was changed.
    """
    earlier = earlier_generations(stage)
    pairs = zip(stage.config.source, open_sources(stage.config), strict=True)
    return [
        _scan_source(stage, config, source, earlier, samples_per_part) for config, source in pairs
    ]


def save_listings(folder: Path, scanned: Sequence[ScannedSource]) -> None:
    """Keep which files are measured, for data that are appended later."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, one in enumerate(scanned):
        save_files(files_path(folder, i), one.files, one.scan)


def explain_listing(folder: Path, scanned: Sequence[ScannedSource], field: str) -> str | None:
    """What changed in the files of a source since its listing was kept.

    Args:
        folder: where `save_listings` kept them.
        field: of a fingerprint, such as source.0.listing.

    Returns:
        None where it is another field, the listing is gone, or it was of the same files.
    """
    match = re.fullmatch(r"source\.(\d+)\.listing", field)
    if match is None or int(match[1]) >= len(scanned):
        return None
    number = int(match[1])
    path = files_path(folder, number)
    if not path.exists():
        return None
    changes = describe_changes(path, scanned[number].files)
    path_now = scanned[number].source.path
    return f"{field}: the files of {path_now} are others: {changes}" if changes else None


def _scan_source(
    stage: Stage,
    config: SourceConfig,
    source: Source,
    earlier: Sequence[Generation],
    samples_per_part: int,
) -> ScannedSource:
    # Listed before it is scanned: a file that comes in between is new to the next append.
    files = list_files(source)
    known = [
        files_path(generation.workspace.files, old_id)
        for generation in earlier
        if (old_id := generation.same_source(config)) is not None
    ]
    growth = None
    if known:
        growth = find_growth(source, files, known, accept=stage.accept_mismatch)
        files = growth.added
    return ScannedSource(source, _scan(source, growth, samples_per_part), files)


def _scan(source: Source, growth: Growth | None, samples_per_part: int) -> Scan:
    if growth is None:
        return source.scan(samples_per_part)
    if not growth.num_added:
        return Scan((), "nothing new")
    return source.scan_new(samples_per_part, growth)
