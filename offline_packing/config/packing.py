"""The configuration: one YAML file, with overrides `a.b=value` from the command line.

Every model is frozen and refuses unknown keys. Relative paths are relative to the current folder.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

from offline_packing.config.sections import (
    EngineConfig,
    OutputConfig,
    PackConfig,
    ReportConfig,
    Section,
)
from offline_packing.index.chosen import parse_filters
from offline_packing.index.table import load_info
from offline_packing.layouts import LAYOUTS
from offline_packing.sources import SourceOptions, parse_options
from offline_packing.sources.options import FieldOptions
from offline_packing.storage.yaml_file import read_config, validate
from task_encoders.families import AnyModelOptions, model_options
from task_encoders.families.base.cost import dynamic_from
from task_encoders.field_types import invalid


class PackingConfig(Section):
    """Everything one packed dataset is made from."""

    source: tuple[SerializeAsAny[Annotated[SourceOptions, BeforeValidator(parse_options)]], ...]
    model: AnyModelOptions = model_options()
    pack: PackConfig = PackConfig()
    output: OutputConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)
    report: ReportConfig = ReportConfig()

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_many(cls, source: Any) -> Any:
        source = [source] if isinstance(source, Mapping) else source
        is_list = isinstance(source, list | tuple)
        return [one for given in source for one in _measured_from(given)] if is_list else source

    @field_validator("source")
    @classmethod
    def _check_sources(cls, sources: tuple[SourceOptions, ...]) -> tuple[SourceOptions, ...]:
        if not sources:
            raise ValueError("no source is given; add one")
        tasks = sorted({source.task for source in sources})
        if len(tasks) > 1:
            raise ValueError(
                f"the sources have tasks {' and '.join(tasks)}, an output has one; pack each into "
                "its own output, and blend these"
            )
        if any(source.weight for source in sources):
            if not all(source.weight for source in sources):
                raise ValueError("some sources have a weight and others none; give each a weight")
            if any(source.repeat != 1 for source in sources):
                raise ValueError("a source has a weight and a repeat; remove one of them")
        names = [_source_name(source) for source in sources]
        repeated = {name for name in names if name and names.count(name) > 1}
        if repeated:
            raise ValueError(f"two sources are called {min(repeated)!r}; give each its own name")
        for one, other in itertools.permutations(sources, 2):
            if one.reads_within(other):
                raise ValueError(
                    f"the samples of source.path {one.path!r} are also in {other.path!r}; remove "
                    "one of the two sources, and raise repeat or weight to train samples more often"
                )
        return sources

    @model_validator(mode="after")
    def _check_output(self) -> "PackingConfig":
        output = Path(self.output.path).resolve()
        for source in self.source:
            others = filter(None, (*source.outputs_skipped, source.index))
            if any(output == Path(path).resolve() for path in others):
                raise ValueError(
                    f"output.path {self.output.path!r} is named by source.skip or format index; "
                    "new packs need their own folder"
                )
            if output.is_relative_to(Path(source.path).resolve()):
                raise ValueError(  # it would find its own packs
                    f"output.path {self.output.path!r} is inside source.path {source.path!r}; "
                    "choose a folder outside"
                )
        if self.pack.share_prefixes is not None:
            self._check_prefixes()
        if (mixture := self.pack.mixture) is not None:
            names = self.source_names()
            given = {name for name in mixture.start | mixture.end if mixture.share(name)}
            if wrong := given ^ {*names}:
                what = "no source" if min(wrong) in given else "a source without a share"
                why = f"{min(wrong)!r} is {what}; give shares to {', '.join(names)}"
                raise ValueError(f"pack.mixture: {why}")
            if any(source.weight or source.repeat != 1 for source in self.source):
                raise ValueError(
                    "pack.mixture decides how often samples are used; remove weight and repeat"
                )
        kept = {place for source in self.source for place in getattr(source, "keep", ())}
        where = [] if self.pack.where is None else parse_filters(self.pack.where)
        for (_, name), *_ in itertools.chain(*where):
            if name not in kept:
                raise ValueError(
                    f"pack.where names {name!r}, which no source keeps "
                    f"(kept: {', '.join(sorted(kept)) or 'nothing'}); add it to source.keep"
                )
        try:
            LAYOUTS[self.output.layout].check(self.task, getattr(self.model, "family", ""))
        except ValueError as error:
            raise ValueError(f"output.layout={self.output.layout!r} {error}") from error
        return self

    @property
    def may_share_prefixes(self) -> bool:
        """Whether pack.share_prefixes is off, and would be accepted."""
        try:
            self._check_prefixes()
            PackConfig.model_validate({**self.pack.model_dump(), "share_prefixes": True})
        except ValueError:
            return False
        return self.pack.share_prefixes is None

    def _check_prefixes(self) -> None:
        """Refuse pack.share_prefixes where packs cannot hold trees."""
        layout, processor = self.output.layout, self.model.processor
        if layout != "energon":
            raise ValueError(
                f"pack.share_prefixes: output.layout={layout!r} does not store which samples share "
                "a prefix; choose energon, or leave out pack.share_prefixes"
            )
        if (limit := dynamic_from(processor)) is not None and self.pack.seq_length > limit:
            raise ValueError(
                f"pack.share_prefixes: angles of {processor} depend on the length of samples above "
                f"{limit} tokens (rope_type dynamic); set pack.seq_length to at most {limit}, or "
                "leave out pack.share_prefixes"
            )

    @property
    def task(self) -> str:
        """Task that the packs are trained as."""
        return self.source[0].task

    @model_validator(mode="after")
    def _check_splitting(self) -> "PackingConfig":
        loss_on = getattr(self.model, "loss_on", "all")
        earlier = self.pack.split_turns.context_turns
        trains_all, is_captioning = self.output.layout != "energon", self.task == "captioning"
        layout = f"output.layout={self.output.layout!r}"
        context = f"pack.split_turns.context_turns={earlier} shows turns without loss, and"
        if self.splits and loss_on != "all":
            raise ValueError(
                f"model.loss_on={loss_on} and split_turns both train a part of a record; leave out "
                "one of them"
            )
        for name, default in (("loss_on", "all"), ("empty_thoughts", "train")):
            value = getattr(self.model, name, default)
            if value != default and trains_all and not is_captioning:
                raise ValueError(
                    f"model.{name}={value} trains only a part of the answers, but {layout} trains "
                    f"all of them; remove model.{name}, or choose another layout"
                )
        if earlier and is_captioning:
            raise ValueError(f"{context} all text of a document is trained; set it to 0")
        if earlier and trains_all:
            raise ValueError(f"{context} {layout} would train them; set it to 0")
        return self

    @property
    def names_groups(self) -> bool:
        """Whether any source names its records' groups, which decide their splits."""
        return any(
            isinstance(source, FieldOptions) and "group" in source.fields for source in self.source
        )

    @property
    def splits(self) -> bool:
        """Whether long conversations become several samples."""
        return self.pack.on_overlong == "split_turns"

    @property
    def cut_for(self) -> dict[str, str | int]:
        """Fields on which the parts of conversations depend; empty if none are cut."""
        pack = self.pack
        if not self.splits:
            return {}
        return {
            "output.layout": self.output.layout,
            "pack.on_overlong": pack.on_overlong,
            "pack.split_turns": str(pack.split_turns.model_dump()),
            "pack.seq_length": pack.longest_sample,
            "pack.budgets": str(dict(sorted(pack.budgets.items()))),
        }

    @property
    def weights(self) -> list[float] | None:
        """Proportions of the sources' tokens; None: they follow from repeats."""
        if self.pack.mixture is not None:
            return list(map(self.pack.mixture.share, self.source_names()))
        weights = [source.weight for source in self.source if source.weight]
        return weights or None

    def key_prefixes(self) -> list[str]:
        """Return the prefix of each source's keys; empty for a single unnamed source."""
        if len(self.source) == 1 and self.source[0].name is None:
            return [""]
        names = map(_source_name, self.source)
        return [f"{name}/" if name else "" for name in names]

    def source_names(self) -> list[str]:
        """Return labels of the sources: their names, or the last parts of their paths."""
        return [
            prefix.rstrip("/") or source.path.rstrip("/").rpartition("/")[2]
            for source, prefix in zip(self.source, self.key_prefixes(), strict=True)
        ]


#: Options that format index allows; all but the first three override those of the index.
_INDEX_OPTIONS: Final = ("format", "path", "task", "name", "skip", "repeat", "weight", "text_only")


def _measured_from(source: Any) -> list[Any]:
    """Replace a source of format index by the sources of that index, or by the one with its name;
    return any other source itself. Raises StageError as `load_info`."""
    if not isinstance(source, Mapping) or source.get("format") != "index":
        return [source]
    given = SourceOptions.model_validate({"task": "bmr", **source})
    if others := given.model_fields_set - {*_INDEX_OPTIONS}:
        why = "samples of an index are as they were measured; remove it"
        raise invalid("source", min(others), source[min(others)], why)
    own = given.model_dump(include={*_INDEX_OPTIONS[3:]}, exclude_defaults=True)
    found, of = load_info(given.path).sources, f"the index of {given.path}"
    if given.name is not None and len(found) > 1:
        names = ", ".join(str(one["name"]) for one in found)
        found = [one for one in found if one["name"] == given.name]
        if not found:
            raise invalid("source", "name", given.name, f"{of} does not hold it; choose {names}")
    if len(found) > 1 and (shares := own.keys() & {"repeat", "weight"}):
        why = f"{of} holds several sources; set source.name to one of them"
        raise invalid("source", min(shares), own[min(shares)], why)
    if "task" in source and source["task"] != found[0]["task"]:
        why = f"{of} was measured for {found[0]['task']}; leave it out"
        raise invalid("source", "task", given.task, why)
    return [{**one, **own, "index": given.path} for one in found]


def _source_name(source: SourceOptions) -> str:
    return Path(source.path).resolve().stem if source.name is None else source.name


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PackingConfig:
    """Read a configuration as `read_config`."""
    return read_config(PackingConfig, path, overrides)


def parse_config(content: Mapping[str, Any]) -> PackingConfig:
    """Validate a configuration as `validate`."""
    return validate(PackingConfig, content)
