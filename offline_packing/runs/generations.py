"""What earlier generations of an output were made from: the original data, then each append.

A source of the configuration is one of theirs where format and place are the same. It must then be
used as it was: what is packed already cannot be packed otherwise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offline_packing.config.packing import PackingConfig, SourceConfig, parse_config
from offline_packing.errors import StageError
from offline_packing.index.table import Index, IndexInfo
from offline_packing.runs.run import Stage
from offline_packing.runs.workspace import Workspace
from offline_packing.storage.files import read_json

#: Of a source that is appended to, what must be as it was.
_FIXED: Final = ("task", "fields", "image_root", "repeat", "weight")


@dataclass(frozen=True)
class Generation:
    """One earlier run over this output."""

    workspace: Workspace
    config: PackingConfig

    def open_index(self) -> Index:
        """Its index, which is complete: the manifest tells of it."""
        info = IndexInfo.load(self.workspace.index_info)
        if info is None:
            raise StageError(
                f"{self.workspace.index_info} is missing; append needs _packing as it was written"
            )
        return Index(self.workspace.index, info)

    def same_source(self, source: SourceConfig) -> int | None:
        """The id that a source has in this generation; None where it is not among its sources."""
        wanted = _identity(source)
        ids = [i for i, own in enumerate(self.config.source) if _identity(own) == wanted]
        # One path may be two sources, of two captions for each image: these must have names.
        named = (i for i in ids if self.config.source[i].name == source.name)
        return next(named, ids[0] if ids else None)


def earlier_generations(stage: Stage) -> list[Generation]:
    """The generations before the stage's, in order."""
    if stage.generation == 0:
        return []
    manifest: Mapping[str, Any] = read_json(stage.workspace.manifest)
    origins = [manifest, *manifest["appended"]][: stage.generation]
    return [
        Generation(
            stage.workspace.of_generation(number),
            _parse_origin(origin, stage.config, f"generation {number}"),
        )
        for number, origin in enumerate(origins)
    ]


def _parse_origin(origin: Mapping[str, Any], now: PackingConfig, name: str) -> PackingConfig:
    """The configuration that a manifest tells of, with what it leaves out as it is now."""
    content = {
        **origin["config"],
        "output": {**origin["config"]["output"], "path": now.output.path},
        "engine": now.engine.model_dump(),
    }
    return parse_config(content, name)


def adopt_sources(config: PackingConfig, earlier: list[Generation]) -> PackingConfig:
    """The configuration with the names, and so the keys, that known sources had before: whether a
    source has a name by default depends on how many there are.

    Raises:
        StageError: a known source is to be used otherwise than before.
    """
    sources = []
    for i, source in enumerate(config.source):
        _check_apart(source, earlier)
        for generation, old_id in _known(earlier, source):
            source = _adopt(source, i, generation.config, old_id)
        sources.append(source)
    return config.model_copy(update={"source": tuple(sources)})


def _known(earlier: list[Generation], source: SourceConfig) -> Iterator[tuple[Generation, int]]:
    for generation in earlier:
        old_id = generation.same_source(source)
        if old_id is not None:
            yield generation, old_id


def _check_apart(source: SourceConfig, earlier: list[Generation]) -> None:
    """Raise StageError if a source holds, or lies in, another one that is packed already."""
    own = _identity(source)
    for generation in earlier:
        for before in generation.config.source:
            known = _identity(before)
            inside = f"{own[1]}/".startswith(f"{known[1]}/") or f"{known[1]}/".startswith(
                f"{own[1]}/"
            )
            if inside and own[0] == known[0] and own[1] != known[1]:
                raise StageError(
                    f"source path {source.path!r} shares files with {before.path!r}, which is "
                    f"packed already; append {before.path!r} itself, of which only what is new is "
                    "taken, or a folder apart from it"
                )


def _adopt(source: SourceConfig, number: int, old: PackingConfig, old_id: int) -> SourceConfig:
    before = old.source[old_id]
    name = old.key_prefixes()[old_id].removesuffix("/")
    wanted = {field: (getattr(before, field), getattr(source, field)) for field in _FIXED}
    if source.name is not None:
        wanted["name"] = (name, source.name)
    for field, (was, now) in wanted.items():
        if was != now:
            raise StageError(
                f"source.{number}.{field} was {was!r}, is {now!r}: {source.path} is packed "
                "already; append with the same, or choose another output.path"
            )
    return source.model_copy(update={"name": name})


def _identity(source: SourceConfig) -> tuple[str, ...]:
    path = source.path if "://" in source.path else str(Path(source.path).resolve())
    return source.format, path.rstrip("/"), source.split or "train", source.dataset or ""
