"""One run, as passed to every stage, with the sources and the encoder that it names, and where the
artifacts of its output are. Trainers are given the output folder itself.

OUT/train-000000.tar, .tar.idx, .nv-meta/, manifest.json    the packed dataset
OUT/_packing/STAGE.json, copies/, STAGE.started.json        receipts, see storage/receipts.py
OUT/_packing/index/, repeated/, set_aside/, files/          measure
OUT/_packing/plan/                                          plan
OUT/_packing/write/                                         write: one fragment per shard
OUT/_packing/report/                                        report: for people, and as JSON
OUT/_packing/unpacked/                                      while packs are written or compared
"""

import functools
import io
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import EngineConfig
from offline_packing.engines import ENGINES, Engine
from offline_packing.errors import ConfigError, StageError
from offline_packing.index.measured import MODIFICATION_TIME
from offline_packing.layouts.container import remove_shards
from offline_packing.runs.training_run import Trained, read_trained
from offline_packing.sources import Source, open_source
from offline_packing.sources.roots.roots import RemoteRoot
from offline_packing.storage.files import (
    hold_lock,
    is_remote,
    remove_folder,
    remove_path,
    remove_temporaries,
    scratch_folder,
)
from offline_packing.storage.receipts import (
    STAGES,
    Fingerprint,
    Receipt,
    Started,
    copy_path,
    load_receipt,
    receipt_path,
    started_path,
)
from task_encoders.families import ModelOptions, build_sample_encoder
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.field_types import NonNegative
from task_encoders.storage.paths import as_remote, path_of
from task_encoders.storage.remote_requests import REPEATS, RemoteError

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES: Final = 60
#: measure: 120,000 of 600,000 samples, 20%, 03:10 left
_LINE: Final = "{desc}: {n:,} of {total:,} {unit}s, {percentage:.0f}%, {remaining} left"
#: if the total is unknown
_OPEN_LINE: Final = "{desc}: {n:,} {unit}s in {elapsed}"


class _Lines(io.TextIOBase):
    """Standard error, where every state of a bar gets its own line."""

    def write(self, text: str) -> int:
        line = text.strip()
        return sys.stderr.write(f"{line}\n") if line else 0


@dataclass(frozen=True)
class PlanFacts:
    """Facts of a plan's receipt."""

    #: of the files that say which samples form which pack
    hash: str
    #: samples set aside while planning, by reason
    set_aside: dict[str, NonNegative]
    copies: NonNegative = 0
    #: what the training runs of source.skip had trained, by their paths
    trained: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanReceipt(Receipt):
    """Receipt of a plan."""

    facts: PlanFacts  # type: ignore[assignment]


class Workspace:
    """Paths below one output folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: present when the packed dataset is complete
        self.manifest = root / "manifest.json"
        #: Energon's metadata
        self.nv_meta = root / ".nv-meta"
        #: everything that training does not read
        self.packing = root / "_packing"
        #: the same; of an output in object storage, a local folder, which goes at the end
        self.scratch = scratch_folder(self.packing)
        #: folder of the index parts
        self.index = self.packing / "index"
        #: folder of the numbers of rows of each part whose ids repeat, see measure/identity.py
        self.repeated = self.packing / "repeated"
        #: folder of the parts of the set-aside table
        self.set_aside = self.packing / "set_aside"
        #: folder of the tables of the source files that were measured
        self.files = self.packing / "files"
        #: folder of the keys that source.skip leaves out, while samples are measured
        self.skip = self.packing / "skip"
        #: folder of damaged files, and of files made in their place; see runs/repair.py
        self.damaged, self.again = self.packing / "damaged", self.packing / "again"
        self.plan = self.packing / "plan"
        #: folder of one fragment per finished shard
        self.write = self.packing / "write"
        self.report = self.packing / "report"
        #: folder of copies of files without random access: compressed files, and large row groups.
        #: Present while packs are written or compared with their source
        self.unpacked = self.scratch / "unpacked"

    def read_plan(self) -> PlanReceipt | None:
        """Return the receipt of the plan. Raises DamagedError as `load_receipt`."""
        found: PlanReceipt | None = load_receipt(self.packing, "plan", PlanReceipt)
        return found

    def written_with(self) -> Fingerprint:
        """Return the inputs of the shards, complete or not; empty before the first write."""
        found = load_receipt(self.packing, "write") or Started.load(self.packing, "write")
        return found.inputs if found else {}

    def name_of(self, path: Path) -> str:
        """Return the name of a file relative to the output, as receipts have it."""
        return str(path.relative_to(self.root))

    @contextmanager
    def lock(self, *, shared: bool = False) -> Iterator[None]:
        """Lock this output against other runs; if `shared`, only against runs that do not share it.
        Raises StageError if another run holds it, or the folder holds files that are not ours."""
        if self.root.exists() and not self.packing.exists() and any(self.root.iterdir()):
            raise StageError(
                f"output.path {str(self.root)!r} is not empty and does not hold an earlier run; "
                "choose another folder"
            )
        with hold_lock(self.packing / "lock", f"output {str(self.root)!r}", shared=shared):
            if shared:
                yield
                return
            self._remove_remains()
            repeats = REPEATS["requests"]
            try:
                yield
            finally:
                self._remove_remains()
                if count := REPEATS["requests"] - repeats:
                    logger.info("%s: %d requests failed and were made again", self.root, count)

    def _remove_remains(self) -> None:
        """Remove uploads that killed runs left in object storage, and scratch files."""
        if not (remote := as_remote(self.root)):
            return
        remove_folder(self.scratch)
        try:
            count = remote.abort_uploads()
        except RemoteError as error:
            logger.warning("%s; uploads that were cut off may be left", error)
            return
        if count:
            logger.info("%s: %d uploads that were cut off are removed", self.root, count)

    def remove_temporaries(self) -> None:
        """Remove incomplete files of killed runs. Objects are never incomplete."""
        if not is_remote(self.root):
            own = (self.root, self.nv_meta, self.packing, *self.packing.rglob("*/"))
            shards = (self.root / path.name for path in self.write.glob("*/"))  # in folders
            for folder in (*own, *shards):
                remove_temporaries(folder)


@dataclass(frozen=True)
class Run:
    """One run over one output: the configuration with its sources and encoder."""

    config: PackingConfig
    engine: Engine
    #: fields of the fingerprint that may differ; or the files' modification times
    accept_mismatch: frozenset[str] = frozenset()
    #: whether to show progress
    progress: bool = False

    @functools.cached_property
    def workspace(self) -> Workspace:
        """Paths of the artifacts."""
        return Workspace(path_of(self.config.output.path))

    @functools.cached_property
    def trained(self) -> Mapping[str, Trained]:
        """What the training runs of source.skip trained: as the plan recorded it, so that it stays
        the plan of its shards; without a plan, or under output.overwrite, up to now."""
        stored = None if self.config.output.overwrite else self.workspace.read_plan()
        paths = sorted({path for source in self.config.source for path in source.trained_by})
        recorded = stored.facts.trained if stored else {}
        return {path: recorded.get(path) or read_trained(path) for path in paths}

    @property
    def accepted_fields(self) -> frozenset[str]:
        """Fields of the fingerprint that may differ."""
        return self.accept_mismatch - {MODIFICATION_TIME}

    @contextmanager
    def unpacked_files(self) -> Iterator[None]:
        """Let tasks unpack files while the block runs, and remove these files afterwards. They stay
        if shards are left to write, for which they would be unpacked again, or if other ranks may
        be reading."""
        try:
            yield
        finally:
            if self.workspace.manifest.exists() and not self.engine.IS_SHARED:
                remove_folder(self.workspace.unpacked)

    def drop(self, stage: str) -> None:
        """Remove what a stage made and all that was made from it: the last stage goes first, and a
        receipt before its files, so that a killed removal leaves no receipt of lost files."""
        at = self.workspace
        folders = {
            # Unpacked copies go too: perhaps the files were replaced.
            "measure": (at.index, at.repeated, at.set_aside, at.files, at.unpacked),
            "plan": (at.plan,),
            "write": (at.write, at.damaged),
        }
        for name in reversed(STAGES[STAGES.index(stage) :]):
            if name == "write":
                remove_path(at.manifest)  # it tells trainers that the shards are complete
            for path in (receipt_path, copy_path, started_path):
                remove_path(path(at.packing, name))
            if name == "write" and at.write.exists():
                remove_shards(at.root)
            for folder in folders.get(name, ()):
                remove_folder(folder)

    def bar(self, name: str, total: int | None, unit: str) -> AbstractContextManager["tqdm[None]"]:
        """Show the progress of a stage, see `progress_bar`."""
        return progress_bar(name, total, unit, shown=self.progress)


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, *, shown: bool) -> Iterator["tqdm[None]"]:
    """Show the progress of a stage in `total` units (None: unknown): a bar in a terminal, with log
    lines above it, or a line a minute in a log."""
    is_terminal = sys.stderr.isatty()
    lines = {
        "file": _Lines(),
        "bar_format": _LINE if total else _OPEN_LINE,
        "mininterval": _SECONDS_BETWEEN_LINES,
        "maxinterval": _SECONDS_BETWEEN_LINES,
        "delay": _SECONDS_BETWEEN_LINES,
    }
    above = nullcontext()
    if shown and is_terminal:
        from tqdm.contrib.logging import logging_redirect_tqdm  # imports asyncio: 30 ms

        above = logging_redirect_tqdm()
    options = {"disable": not shown, **({} if is_terminal else lines)}
    with tqdm(total=total or None, desc=name, unit=unit, **options) as bar, above:
        yield bar


def build_engine(engine: EngineConfig) -> Engine:
    """Return the engine that a configuration names."""
    own = {"ray_remote_args": engine.ray_remote_args} if engine.ray_remote_args else {}
    return ENGINES[engine.name](engine.workers, **own)


def open_sources(config: PackingConfig) -> list[Source]:
    """Open the sources of a configuration; a source's id is its place in the list."""
    unpack_folder = Workspace(path_of(config.output.path).resolve()).unpacked
    sources = [
        open_source(source, key_prefix=prefix, unpack_folder=unpack_folder)
        for source, prefix in zip(config.source, config.key_prefixes(), strict=True)
    ]
    roots = [root for source in sources for root in (source.root, source.media)]
    for source in sources:
        source.beside_remote = any(isinstance(root, RemoteRoot) for root in roots)
    return sources


@functools.lru_cache(maxsize=4)
def open_encoder(model: ModelOptions) -> FamilyEncoder:
    """Build the sample encoder of a model, once per process. Raises ConfigError if there is no such
    model, or its limits contradict each other."""
    try:
        return build_sample_encoder(model)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model: {' '.join(str(error).split())}") from error


def listed(reasons: Iterable[tuple[str, int]]) -> str:
    """Write reasons with their counts on one line: 'bad_json 2, overlong 11', or 'none'."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(reasons)) or "none"
