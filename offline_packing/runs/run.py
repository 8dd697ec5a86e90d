"""One run, as passed to every stage, and the sources and the encoder that it names."""

import functools
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from offline_packing.config.packing import PackingConfig
from offline_packing.engines import ENGINES, Engine
from offline_packing.errors import ConfigError
from offline_packing.index.stamps import MODIFICATION_TIME
from offline_packing.layouts import LAYOUTS
from offline_packing.runs.bar import progress_bar
from offline_packing.runs.workspace import Workspace
from offline_packing.sources import Source, open_source
from offline_packing.storage.fingerprint import Fingerprint
from task_encoders.families import ModelSettings, build_sample_encoder
from task_encoders.sample_encoder import SampleEncoder


@dataclass(frozen=True)
class Run:
    """One run over one output: the configuration and what belongs to it."""

    config: PackingConfig
    engine: Engine
    #: fields of the fingerprint that may differ; or the files' modification times
    accept_mismatch: frozenset[str] = frozenset()
    #: whether to show progress
    progress: bool = False

    @property
    def workspace(self) -> Workspace:
        """Where the artifacts lie."""
        return Workspace(Path(self.config.output.path))

    @property
    def accepted_fields(self) -> frozenset[str]:
        """Fields of the fingerprint that may differ."""
        return self.accept_mismatch - {MODIFICATION_TIME}

    @contextmanager
    def unpacked_files(self) -> Iterator[None]:
        """Tasks may unpack files while the block runs. Afterwards these are removed, unless shards
        are left to write or other ranks may be reading them."""
        try:
            yield
        finally:
            if not self.engine.IS_SHARED:
                self.workspace.remove_unpacked()

    def discard_index(self) -> None:
        """Remove the index and all that was made from it."""
        self.discard_plan()
        folder = self.workspace
        folder.index_info.unlink(missing_ok=True)
        # What was unpacked goes too: perhaps its files were replaced.
        for path in (folder.index, folder.set_aside, folder.files, folder.unpacked):
            shutil.rmtree(path, ignore_errors=True)

    def discard_plan(self) -> None:
        """Remove the plan and all that was made from it."""
        self.discard_shards()
        shutil.rmtree(self.workspace.plan, ignore_errors=True)

    def discard_shards(self) -> None:
        """Remove the shards; the manifest, which says that they are complete, goes first."""
        self.workspace.manifest.unlink(missing_ok=True)
        if self.workspace.write.exists():
            for layout in LAYOUTS.values():
                layout.remove(self.workspace.root)
            shutil.rmtree(self.workspace.write)

    def bar(self, name: str, total: int | None, unit: str) -> "AbstractContextManager[tqdm[None]]":
        """Progress of a stage, in `total` units; None: their number is unknown."""
        return progress_bar(name, total, unit, shown=self.progress)


def build_engine(config: PackingConfig) -> Engine:
    """The engine that the configuration names."""
    return ENGINES[config.engine.name](config.engine.workers)


def open_sources(config: PackingConfig) -> list[Source]:
    """The sources of a configuration; a source's id is its place in this list."""
    unpack_folder = Workspace(Path(config.output.path).resolve()).unpacked
    return [
        open_source(source, key_prefix=prefix, unpack_folder=unpack_folder)
        for source, prefix in zip(config.source, config.key_prefixes(), strict=True)
    ]


@functools.lru_cache(maxsize=4)
def open_encoder(model: ModelSettings) -> SampleEncoder:
    """The sample encoder of a model, built once per process.

    Raises:
        ConfigError: there is no such model, or its limits contradict each other.
    """
    try:
        return build_sample_encoder(model)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model: {' '.join(str(error).split())}") from error


def config_fingerprint(config: PackingConfig) -> Fingerprint:
    """The part of what the index depends on that the configuration alone determines."""
    fields: dict[str, str | int] = {
        f"model.{name}": value for name, value in open_encoder(config.model).fingerprint.items()
    }
    for i, (source, prefix) in enumerate(zip(config.source, config.key_prefixes(), strict=True)):
        fields[f"source.{i}.format"] = source.format
        fields[f"source.{i}.task"] = source.task
        fields[f"source.{i}.key_prefix"] = prefix
        for name, value in source.format_options().items():
            if isinstance(value, dict):  # a manifest holds them sorted
                value = dict(sorted(value.items()))
            text = ", ".join(value) if isinstance(value, tuple) else str(value)
            fields[f"source.{i}.{name}"] = text
    return fields


def without_listings(fingerprint: Fingerprint) -> dict[str, str | int]:
    """The part of an index's fingerprint that `config_fingerprint` gives."""
    return {name: value for name, value in fingerprint.items() if not name.endswith(".listing")}


def listed(reasons: Iterable[tuple[str, int]]) -> str:
    """'bad_json 2, overlong 11', or 'none'."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(reasons)) or "none"
