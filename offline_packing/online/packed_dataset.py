"""A PyTorch dataset whose items are packs, made from samples while they are read.

    for pack in PackedIterableDataset(samples, seq_length=8192): ...   # lists of samples

Its packs equal those of ms-swift for the strategies `binpack` and `sequential`; `auto` fills packs
better. The collator of ms-swift, or `padding_free_collator`, makes one row of a pack.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from offline_packing.errors import ConfigError
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.online_dataset import OnlineDataset
from offline_packing.online.pools import MatchedWindows, PackingPool, Pool
from offline_packing.planner.samples import check_known
from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.strategies.strategy import Packs
from offline_packing.planner.windows import WindowOptions
from offline_packing.storage.yaml_file import parse_yaml, validate
from task_encoders.field_types import Count, checked, one_of

#: ms-swift's names and ours; what is not among them is a name in STRATEGIES.
_AS_MS_SWIFT: Final = {"binpack": "to_constant_volume", "sequential": "sequential"}
Leftovers = Literal["carry", "emit"]
Yields = Literal["samples", "rows"]


class PackedIterableDataset(OnlineDataset):
    """Packs of at most `seq_length` tokens, made from `buffer_size` usable samples at a time
    (ms-swift's window counts raw samples, also those that it cannot use).

    Args:
        dataset: map-style or iterable; an item is a mapping with `input_ids` or `length`, or an
            `EncodedSample`. Items are read when their turn comes.
        strategy: "binpack" and "sequential" pack as ms-swift does; "auto", or any other name in
            STRATEGIES, with the planner of this package.
        leftovers: "carry": what fills no pack waits for the next samples: the last pack, as in
            ms-swift, or with the planner all packs that are not full, for 16 windows at most.
            "emit": every window goes out whole, whatever the fill.
        template: gets `packing = padding_free = True`, by which ms-swift's collator joins a pack.
        yields: "samples": packs are lists of samples; "rows": `padding_free_collator` of them.
        options: those of `OnlineDataset`.

    The loader's batches are packs: use `batch_size=None`, or a collator that joins packs.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        *,
        seq_length: Count,
        buffer_size: Count = 1000,
        strategy: str = "binpack",
        leftovers: Leftovers = "carry",
        template: Any = None,
        yields: Yields = "samples",
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        check_known("strategy", strategy, [*_AS_MS_SWIFT, *STRATEGIES])
        self._options = WindowOptions(
            seq_length=seq_length,
            window=buffer_size,
            strategy=_AS_MS_SWIFT.get(strategy, strategy),
            seed=self.seed,
        )
        self._strategy = strategy
        self._leftovers = leftovers
        self._yields = yields
        if template is not None:
            template.packing = True
            template.padding_free = True

    def settings(self) -> dict[str, Any]:
        return {
            "seq_length": self._options.seq_length,
            "buffer_size": self._options.window,
            "strategy": self._strategy,
            "leftovers": self._leftovers,
        }

    def make_pool(self) -> Pool[Any]:
        options = self._options
        carries = self._leftovers == "carry"
        if carries and self._strategy not in _AS_MS_SWIFT:
            return PackingPool(options)
        return MatchedWindows(
            self._match, options.seq_length, window=options.window, holds_last=carries
        )

    def collate(self, samples: list[Any]) -> Any:
        return samples if self._yields == "samples" else padding_free_collator(samples)

    def _match(self, lengths: np.ndarray, window: int) -> Packs:
        options = self._options
        strategy = STRATEGIES[options.strategy]
        return strategy(lengths, options.seq_length, seed=options.seed + window)


class PackedDatasetWrapper(PackedIterableDataset):
    """`PackedIterableDataset` with the arguments in the order of ms-swift's datasets."""

    def __init__(
        self,
        dataset: Any,
        template: Any,
        packing_length: int,
        buffer_size: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(
            dataset,
            template=template,
            seq_length=packing_length,
            buffer_size=buffer_size,
            **options,
        )


class PackingBlock(BaseModel):
    """The block `packing:` of a trainer's YAML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    #: tokens of a pack
    max_length: Count
    #: samples packed at a time; null: 1000
    buffer_size: Count | None = None
    strategy: Annotated[str, one_of((*_AS_MS_SWIFT, *STRATEGIES))] = "binpack"
    leftovers: Leftovers = "carry"

    @classmethod
    def read(cls, path: str | Path) -> "PackingBlock":
        """The block of a file, whatever else the file holds. Raises ConfigError if there is none,
        or a field of it is unknown or has a bad value."""
        content = parse_yaml(Path(path).read_text("utf-8"), f"config {str(path)!r}")
        if not isinstance(content, Mapping) or not isinstance(content.get("packing"), Mapping):
            raise ConfigError(
                f"config {str(path)!r} has no block packing; add one: "
                "packing: {enabled: true, max_length: 4096}"
            )
        return validate(cls, content["packing"], "packing")

    def wrap(self, dataset: Any, template: Any = None, **options: Any) -> Any:
        """The dataset, packed if `enabled`."""
        if not self.enabled:
            return dataset
        return PackedDatasetWrapper(
            dataset,
            template,
            self.max_length,
            self.buffer_size or 1000,
            strategy=self.strategy,
            leftovers=self.leftovers,
            **options,
        )
