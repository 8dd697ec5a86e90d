"""PyTorch datasets whose items are packs, made from samples while they are read.

    PackedIterableDataset(samples, seq_length=8192)
    ConstantLengthDataset(samples, seq_length=4096, max_images_per_pack=18)
    DynamicBatches(samples, max_seq_len=8192)

The packs of the first equal those of ms-swift for the strategies `binpack` and `sequential`; `auto`
fills packs better. The second is the data pipeline of nanoVLM: samples that are too long or have
too many images are left out, and a thread packs buffers of the others by a balanced knapsack ahead
of the trainer. The third has VeOmni's two modes: a budget gives all ranks steps of similar length;
a fixed number of samples makes epochs and steps countable beforehand.

    lengths 4, 2, 3, 1 and a budget of 10   [A B C D | E F | G H I | J]
    dyn_bsz=False, micro_batch_size=2       [A B C D | E F], [G H I | J]
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offline_packing.errors import ConfigError
from offline_packing.online.collate import padding_free_collator
from offline_packing.online.online_dataset import OnlineDataset
from offline_packing.online.pools import FixedCount, MatchedWindows, Strategy, TokenBudget
from offline_packing.online.prefetch import Prefetched
from offline_packing.planner.samples import check_known
from offline_packing.planner.strategies import STRATEGIES
from offline_packing.planner.windows import WindowOptions
from offline_packing.storage.yaml_file import parse_yaml, validate
from task_encoders.field_types import Count, NonNegative, checked, one_of
from task_encoders.samples import SampleError

#: ms-swift's names and ours; any other name is looked up in STRATEGIES.
_AS_MS_SWIFT: Final = {"binpack": "to_constant_volume", "sequential": "sequential"}
Leftovers = Literal["carry", "emit"]
Yields = Literal["samples", "rows"]


class PackedIterableDataset(OnlineDataset):
    """Packs of at most `seq_length` tokens, made from `buffer_size` usable samples at a time
    (ms-swift's window counts raw samples, including unusable ones).

    Args:
        dataset: map-style or iterable; an item is a mapping with `input_ids` or `length`, or an
            `EncodedSample`. Items are read when their turn comes.
        strategy: "binpack" and "sequential" pack as ms-swift does; "auto", or any other name in
            STRATEGIES, with the planner of this package.
        leftovers: "carry": packs that are not full wait for the next samples: the last one, as in
            ms-swift, or with the planner all, for 16 windows at most, or 16 packs' worth of samples
            if windows hold less than a pack. "emit": every window goes out whole.
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
        seed: NonNegative = 0,
        **options: Any,
    ) -> None:
        check_known("strategy", strategy, [*_AS_MS_SWIFT, *STRATEGIES])
        name, carries = _AS_MS_SWIFT.get(strategy, strategy), leftovers == "carry"
        rule: WindowOptions | Strategy = WindowOptions(
            seq_length, window=buffer_size, strategy=name, seed=seed
        )
        if strategy in _AS_MS_SWIFT or not carries:
            rule = MatchedWindows(seq_length, name, buffer_size, seed, holds_last=carries)
        settings = {
            "seq_length": seq_length,
            "buffer_size": buffer_size,
            "strategy": strategy,
            "leftovers": leftovers,
        }
        collate = list if yields == "samples" else padding_free_collator
        super().__init__(dataset, rule, settings, collate, seed=seed, **options)
        if template is not None:
            template.packing = True
            template.padding_free = True


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
    #: tokens of a pack; needed if `enabled`
    max_length: Count | None = None
    #: samples packed at a time; null: 1000
    buffer_size: Count | None = None
    strategy: Annotated[str, one_of({**_AS_MS_SWIFT, **STRATEGIES})] = "binpack"
    leftovers: Leftovers = "carry"

    @model_validator(mode="after")
    def _check_length(self) -> "PackingBlock":
        if self.enabled and self.max_length is None:
            raise ValueError("max_length is missing; set it")
        return self

    @classmethod
    def read(cls, path: str | Path) -> "PackingBlock":
        """Read the block of a file, which may hold other blocks. Raises ConfigError if there is
        none, or a field of it is unknown or has a bad value."""
        content = parse_yaml(Path(path).read_text("utf-8"), f"config {str(path)!r}")
        if not isinstance(content, Mapping) or not isinstance(content.get("packing"), Mapping):
            raise ConfigError(
                f"config {str(path)!r} has no block packing; add one: "
                "packing: {enabled: true, max_length: 4096}"
            )
        return validate(cls, content["packing"], "packing")

    def wrap(self, dataset: Any, template: Any = None, **options: Any) -> Any:
        """Return the dataset, packed if `enabled`."""
        if self.max_length is None or not self.enabled:
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


class ConstantLengthDataset(Prefetched):
    """Packs of at most ``seq_length`` tokens and ``max_images_per_pack`` images, made ahead.

    Args:
        dataset: map-style or iterable; an item is an `EncodedSample`, or a mapping with `input_ids`
            or `length`, and `images` or `image_grid_thw` if it has any.
        max_sample_length: a longer sample is set aside; default: seq_length.
        separator_tokens: room of each sample besides its tokens; rows hold it only as padding at
            their end. 1 gives nanoVLM's packs, which have a token after each sample.
        max_images_per_sample: a sample with more images is set aside; default: max_images_per_pack.
        buffer_size: samples packed at a time.
        strategy: "knapsack" makes all packs of a buffer evenly full and gives them all out; any
            other that takes budgets fills packs up, and samples that fill none wait for the next
            buffer. "auto" pads least.
        delta: packs that the knapsack makes beyond the number that the tokens need.
        queue_size: packs that wait for the trainer at most.
        yields: "samples": packs are lists of samples; "rows": one row of ``seq_length`` tokens by
            `padding_free_collator`, its end filled with ``pad_token_id``.
        options: of `OnlineDataset`, except lengths: images are counted in the samples read.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        *,
        seq_length: Count,
        max_sample_length: Count | None = None,
        separator_tokens: NonNegative = 0,
        max_images_per_sample: NonNegative | None = None,
        max_images_per_pack: Count = 18,
        buffer_size: Count = 1000,
        strategy: str = "knapsack",
        delta: NonNegative = 5,
        seed: NonNegative = 0,
        queue_size: Count = 8,
        yields: Yields = "samples",
        pad_token_id: NonNegative = 0,
        **options: Any,
    ) -> None:
        even = strategy == "knapsack"
        windows = WindowOptions(
            seq_length=seq_length,
            window=buffer_size,
            full_at=0.0 if even else 1.0,
            seed=seed,
            strategy=strategy,
            strategy_options={"extra_packs": delta} if even else {},
            budgets={"images": max_images_per_pack},
        )
        most_images = max_images_per_pack
        if max_images_per_sample is not None:
            most_images = max_images_per_sample
        alone = (max_sample_length or seq_length, most_images)
        if options.get("lengths") is not None:
            raise ValueError("lengths do not count images, which are limited here; remove lengths")
        settings = {
            "seq_length": seq_length,
            "buffer_size": buffer_size,
            "strategy": [strategy, dict(windows.strategy_options)],
            "budgets": dict(windows.budgets),
            "alone": list(alone),
            "separator_tokens": separator_tokens,
        }
        as_row = partial(padding_free_collator, pad_to_length=seq_length, pad_token_id=pad_token_id)
        collate = as_row if yields == "rows" else list
        measure = partial(_measure, alone=alone, separator_tokens=separator_tokens)
        packs = OnlineDataset(dataset, windows, settings, collate, measure, seed=seed, **options)
        super().__init__(packs, queue_size=queue_size)

    @property
    def set_aside(self) -> Mapping[str, int]:
        """Samples that could not be used, by reason, over all workers of this rank."""
        return self.dataset.set_aside


def _measure(
    sample: Any, num_tokens: int, *, alone: tuple[int, int], separator_tokens: int
) -> tuple[int, Mapping[str, int]]:
    """Return the tokens and images of a sample in a pack; `alone` are its limits by itself."""
    fields = sample if isinstance(sample, Mapping) else {"image_grid_thw": sample.image_grid_thw}
    found = (fields.get(name) for name in ("image_grid_thw", "images"))
    num_images = next((len(images) for images in found if images is not None), 0)
    if num_tokens > alone[0]:
        raise SampleError("overlong", f"{num_tokens} tokens > {alone[0]} of a sample")
    if num_images > alone[1]:
        raise SampleError("over_budget", f"{num_images} images > {alone[1]} of a sample")
    if num_tokens < 1:
        raise SampleError("bad_record", "a sample without tokens")
    return num_tokens + separator_tokens, {"images": num_images}


class DynamicBatches(OnlineDataset):
    """Micro batches, each one row of samples joined as `padding_free_collator` does.

    Args:
        dataset: as of `PackedIterableDataset`.
        dyn_bsz: True: all samples that fit micro_batch_size × max_seq_len tokens; False: always
            micro_batch_size samples, each of at most max_seq_len tokens.
        buffer_size: samples among which a batch's are chosen, the oldest first. A batch is made
            when the buffer is full and has enough tokens. Only for dyn_bsz.
        pad_to_length: pad every joined row with one more segment: True: to micro_batch_size ×
            max_seq_len, or a length, so that kernels are compiled for one shape.
        pad_token_id: pads input_ids.
        collate: instead of `padding_free_collator`; it must then obey `pad_to_length` itself.
        options: those of `OnlineDataset`.
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        *,
        dyn_bsz: bool = True,
        micro_batch_size: Count = 1,
        max_seq_len: Count,
        buffer_size: Count = 200,
        pad_to_length: bool | Annotated[int, Field(ge=1)] = False,
        pad_token_id: NonNegative = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        budget = micro_batch_size * max_seq_len
        length = budget if pad_to_length is True else pad_to_length or None
        if length is not None and length < budget:
            raise ValueError(
                f"pad_to_length is {length}, less than micro_batch_size {micro_batch_size} × "
                f"max_seq_len {max_seq_len} = {budget}, which a batch may have; set True"
            )
        settings = {
            "dyn_bsz": dyn_bsz,
            "micro_batch_size": micro_batch_size,
            "max_seq_len": max_seq_len,
            "buffer_size": buffer_size,
        }
        rule: Strategy = FixedCount(max_seq_len, micro_batch_size)
        if dyn_bsz:
            rule = TokenBudget(budget, buffer_size)
        as_row = partial(padding_free_collator, pad_to_length=length, pad_token_id=pad_token_id)
        super().__init__(dataset, rule, settings, collate or as_row, **options)
