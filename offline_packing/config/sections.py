"""The sections of a configuration that are the same for every source and model."""

import math
import os
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from offline_packing.engines import ENGINES
from offline_packing.layouts import LAYOUTS
from offline_packing.planner.options import PlanOptions, PlanRequest
from offline_packing.planner.passes import asked_passes
from offline_packing.planner.ranks.layout import RankLayout
from task_encoders.field_types import (
    IF_ON,
    BudgetName,
    Count,
    LocalOrRemotePath,
    NonNegative,
    Share,
    one_of,
)


class Section(BaseModel):
    """A part of a configuration: frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


class OrderConfig(Section):
    """The loader that will read the packs, for an order that gives its ranks equal work."""

    #: ranks that will read the packs, and get packs of similar cost at each step
    num_ranks: Count
    #: loader workers on each rank
    num_workers: NonNegative = 1
    #: packs of a step are of one kind: all have images, or all have videos, or all have neither, as
    #: FSDP and ZeRO-3 need; also for every divisor of num_ranks
    uniform: bool = False


class SplitTurnsConfig(Section):
    """Parts that `on_overlong: split_turns` makes: it cuts a conversation between turns, and a
    document at blank lines and in front of media."""

    #: earlier turns that a part shows first, without loss, as far as they fit; not of documents,
    #: and not in the layouts of other trainers
    context_turns: NonNegative = 0


class SharePrefixesConfig(Section):
    """Prefix trees: samples that begin with the same images and videos, and the same text up to
    them, are in one pack, which holds that beginning (the trunk) once."""

    #: samples that may share one copy of their common beginning, with its images and videos; off by
    #: default, and `pack.share_prefixes: true` is short for 16
    max_branches: Annotated[Count, Field(ge=2)] = 16


def _sum_to_one(shares: dict[str, float]) -> dict[str, float]:
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares sum to {sum(shares.values()):g}; make them sum to 1")
    return shares


class MixtureConfig(Section):
    """A mixture that changes over the plan: shares of the tokens by the names of the sources, along
    a line. Their mean decides how often samples are used, as weights do."""

    #: shares of the first packs
    start: Annotated[dict[str, Share], AfterValidator(_sum_to_one)]
    #: shares of the last packs
    end: Annotated[dict[str, Share], AfterValidator(_sum_to_one)]

    def share(self, name: str, place: float = 0.5) -> float:
        """Return a source's share at a place in the plan, 0 to 1; in the middle it is the mean."""
        return self.start.get(name, 0.0) * (1 - place) + self.end.get(name, 0.0) * place


def _as_section(value: Any) -> Any:
    """Replace true by {} and false by None."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


def _a_number(ranks: Any) -> Any:
    """Refuse a mapping of ranks: a number is written."""
    if isinstance(ranks, dict):
        raise ValueError(f"write a number, the ranks of each pack, in place of {ranks}")
    return ranks


class PackConfig(PlanOptions, Section):
    """Options of packing: options of a plan, and others of the configuration."""

    #: what happens to a sample with more tokens than seq_length; split_turns cuts conversations
    #: and documents, and also heeds budgets
    on_overlong: Literal["set_aside", "error", "split_turns"] = "set_aside"
    #: the parts that on_overlong split_turns makes
    split_turns: SplitTurnsConfig = SplitTurnsConfig()
    #: write the packs so that the ranks of this loader get packs of similar cost at each step
    order: OrderConfig | None = None
    #: context-parallel ranks over which every pack is split: samples are padded to what they cut
    context_parallel: Annotated[Count, BeforeValidator(_a_number)] = 1
    #: further limits per pack: {vision_patches: 22000, images: 16, videos: 2}
    budgets: dict[BudgetName, Count] = {}
    #: store once what samples share at their beginning, media included: true, or {max_branches: 16}
    share_prefixes: Annotated[SharePrefixesConfig | None, BeforeValidator(_as_section), IF_ON] = (
        None
    )
    #: shares of the tokens that go from {captions: .7, docs: .3} at the start of the plan to others
    #: at its end: {start: …, end: …}; not with weight or repeat
    mixture: Annotated[MixtureConfig | None, IF_ON] = None
    #: which samples are packed, by fields of source.keep: filters of pyarrow that must all hold,
    #: [[relevance_min, '>=', 3], [source, 'not in', [web]]], or lists of them, one of which must
    where: Annotated[list[Any] | None, IF_ON] = None
    #: nothing is written if a larger share of the samples is set aside
    max_set_aside: Share = 0.05

    @property
    def layout(self) -> RankLayout | None:
        """Loader that the packs are ordered for."""
        return None if self.order is None else RankLayout(**self.order.model_dump())

    @property
    def padding(self) -> int:
        """Multiple that every sample is padded to. `context_parallel` ranks cut each sample into
        2 × ranks chunks, two per rank, whose sum is a multiple of `pad_multiple` (tensor ranks
        under sequence parallelism; 16 for FP8)."""
        ranks = self.context_parallel
        return self.pad_multiple if ranks == 1 else ranks * math.lcm(2, self.pad_multiple)

    @property
    def longest_sample(self) -> int:
        """Tokens that a sample may have."""
        return self.seq_length // self.padding * self.padding

    @model_validator(mode="after")
    def _check_added(self) -> "PackConfig":
        if self.on_overlong != "split_turns" and self.split_turns != SplitTurnsConfig():
            raise ValueError(
                f"split_turns has no effect with on_overlong {self.on_overlong}; remove it, or set "
                "on_overlong to split_turns"
            )
        if self.share_prefixes and self.context_parallel > 1:
            raise ValueError(
                "share_prefixes and context_parallel cannot be combined: each rank would need all "
                "trunks; remove one of them"
            )
        if self.share_prefixes and self.strategy in ("hash_bucket", "sequential"):
            raise ValueError(
                f"strategy {self.strategy} cannot be combined with share_prefixes, which joins "
                "samples; choose strategy auto, or remove share_prefixes"
            )
        asked_passes(PlanRequest(self, self.budgets, self.layout, mixture=self.mixture))
        if self.padding > self.seq_length:
            raise ValueError(
                f"context_parallel {self.context_parallel} pads samples to multiples of "
                f"{self.padding} > seq_length {self.seq_length}; no sample would fit a pack"
            )
        return self


class OutputConfig(Section):
    """Output folder, and the form of its packs."""

    #: the folder a trainer is given, or its URL: s3://bucket/packed, gs://…, msc://…
    path: LocalOrRemotePath
    #: whose trainer reads the packs: a name in LAYOUTS
    layout: Annotated[str, one_of(LAYOUTS)] = "energon"
    #: what packs have of images and videos: copies, or their places in the source's files
    media: Literal["copy", "refer"] = "copy"
    #: the most packs in a shard
    packs_per_shard: Count = 1000
    #: a shard is closed before it would grow beyond this
    max_shard_bytes: Count | None = None
    #: shards in each of several folders, train-0000 …; (default: no folders)
    shards_per_folder: Count | None = None
    #: share of the samples per split; samples stay together that have one value of
    #: source.fields.group, or else lead from one to another by an image or video
    split: dict[str, float] = {"train": 1.0}
    #: seed of the draw of samples for the splits
    split_seed: NonNegative = 0
    #: put before every pack's key, without a dot (default: 8 digits from the source's files and
    #: the plan)
    key_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,48}$")] | None = None
    #: replace artifacts of another configuration instead of stopping
    overwrite: bool = False

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: dict[str, float]) -> dict[str, float]:
        if not split:
            raise ValueError("no split is named; write for example {train: 1.0}")
        for name, share in split.items():
            if not re.fullmatch(r"[A-Za-z0-9_]+", name):
                raise ValueError(f"split name {name!r} may hold letters, digits and _ only")
            if not 0 < share <= 1:
                raise ValueError(f"share of {name!r} is {share}; it must be in (0, 1]")
        return _sum_to_one(split)

    @model_validator(mode="after")
    def _check_media(self) -> "OutputConfig":
        if self.media == "refer" and self.layout != "energon":
            raise ValueError(f"layout {self.layout} stores media in the packs; remove media=refer")
        return self


class EngineConfig(Section):
    """Engine that runs the tasks. Nothing here changes any result."""

    #: a name in ENGINES
    name: Annotated[str, one_of(ENGINES)] = "local"
    #: processes; 0 runs everything in the calling one, and so does the only task of a stage
    workers: NonNegative = Field(default_factory=lambda: len(os.sched_getaffinity(0)))
    #: records per measuring task, and rows per part of the index
    samples_per_part: Count = 4096
    #: of `ray`: options of ray.remote for each task (default: num_cpus 1, max_retries 5)
    ray_remote_args: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_ray(self) -> "EngineConfig":
        if self.ray_remote_args and self.name != "ray":
            raise ValueError(f"ray_remote_args need engine.name=ray, not {self.name}")
        return self


class ReportConfig(Section):
    """Unpacked training that the summary compares with."""

    #: sequences per training step, before and after packing
    global_batch_size: Count = 256
    #: samples padded to the longest among them, in a run without packing
    padded_batch_size: Count = 8
