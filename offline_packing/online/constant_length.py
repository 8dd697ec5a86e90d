"""Sequences of one length, packed while training within a budget of tokens and of images.

    ConstantLengthDataset(samples, seq_length=4096, max_images_per_pack=18)

The data pipeline of nanoVLM: samples that alone are too long or have too many images are left out,
a buffer of the others is packed by a balanced knapsack, and a thread does so ahead of the trainer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from offline_packing.online.collate import padding_free_collator
from offline_packing.online.online_dataset import OnlineDataset
from offline_packing.online.packed_dataset import Yields
from offline_packing.online.pools import NO_AMOUNTS, PackingPool, Pool
from offline_packing.online.prefetch import Prefetched
from offline_packing.planner.windows import WindowOptions
from task_encoders.field_types import Count, NonNegative, checked
from task_encoders.samples import SampleError


class ConstantLengthDataset(Prefetched):
    """Packs of at most ``seq_length`` tokens and ``max_images_per_pack`` images, made ahead.

    Args:
        dataset: map-style or iterable; an item is an `EncodedSample`, or a mapping with `input_ids`
            or `length`, and `images` or `image_grid_thw` if it has any.
        max_sample_length: a longer sample is set aside; default: seq_length.
        separator_tokens: room that each sample takes beside its tokens, in no row but for padding
            at its end: 1 gives nanoVLM's packs, which have a token after each sample.
        max_images_per_sample: likewise one with more images; default: max_images_per_pack.
        buffer_size: samples packed at a time.
        strategy: "knapsack" makes all packs of a buffer evenly full and gives them all out; any
            other that takes budgets fills packs up, and what fills none waits for the next buffer.
            "auto" pads least.
        delta: packs that the knapsack makes beyond those that the tokens need.
        queue_size: packs that wait for the trainer at most.
        yields: "samples": packs are lists of samples; "rows": one row of ``seq_length`` tokens by
            `padding_free_collator`, its end filled with ``pad_token_id``.
        options: those of `OnlineDataset` except lengths: images are counted in the samples read.
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
        packing = WindowOptions(
            seq_length=seq_length,
            window=buffer_size,
            full_at=0.0 if even else 1.0,
            seed=seed,
            strategy=strategy,
            strategy_options={"extra_packs": delta} if even else {},
            budgets={"images": max_images_per_pack},
        )
        most_images = (
            max_images_per_sample if max_images_per_sample is not None else max_images_per_pack
        )
        alone = (max_sample_length or seq_length, most_images)
        as_row = partial(padding_free_collator, pad_to_length=seq_length, pad_token_id=pad_token_id)
        if options.get("lengths") is not None:
            raise ValueError("lengths tell of no images, which count here: leave them out")
        join = as_row if yields == "rows" else list
        packs = _ImagePacks(dataset, packing, alone, separator_tokens, join, seed=seed, **options)
        super().__init__(packs, queue_size=queue_size)

    @property
    def set_aside(self) -> Mapping[str, int]:
        """Samples that could not be used, by reason, over all workers of this rank."""
        return self.dataset.set_aside


class _ImagePacks(OnlineDataset):
    """The packs, made when they are asked for."""

    def __init__(
        self,
        dataset: Any,
        packing: WindowOptions,
        alone: tuple[int, int],
        separator_tokens: int,
        join: Callable[[list[Any]], Any],
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        self._packing = packing
        self._alone = alone
        self._separator_tokens = separator_tokens
        self._join = join

    def settings(self) -> dict[str, Any]:
        return {
            "seq_length": self._packing.seq_length,
            "buffer_size": self._packing.window,
            "strategy": [self._packing.strategy, dict(self._packing.strategy_options)],
            "budgets": dict(self._packing.budgets),
            "alone": list(self._alone),
            "separator_tokens": self._separator_tokens,
        }

    def make_pool(self) -> Pool[Any]:
        return _LimitedPool(self._packing, *self._alone, self._separator_tokens)

    def collate(self, samples: list[Any]) -> Any:
        return self._join(samples)


class _LimitedPool(PackingPool[Any]):
    """A pool that counts images, and takes in no sample over the limits of a single one."""

    def __init__(
        self, options: WindowOptions, max_tokens: int, max_images: int, separator_tokens: int
    ) -> None:
        super().__init__(options)
        self._max_tokens = max_tokens
        self._max_images = max_images
        self._separator_tokens = separator_tokens

    def add(
        self, item: Any, num_tokens: int, amounts: Mapping[str, int] = NO_AMOUNTS
    ) -> list[list[Any]]:
        images = count_images(item.content)
        if num_tokens > self._max_tokens:
            raise SampleError("overlong", f"{num_tokens} tokens > {self._max_tokens} of a sample")
        if images > self._max_images:
            raise SampleError("over_budget", f"{images} images > {self._max_images} of a sample")
        if num_tokens < 1:
            raise SampleError("bad_record", "a sample without tokens")
        room = num_tokens + self._separator_tokens
        return super().add(item, room, {**amounts, "images": images})


def count_images(sample: Any) -> int:
    """Images of an encoded sample; 0 if it has no field for them."""
    read = sample.get if isinstance(sample, Mapping) else lambda name: getattr(sample, name, None)
    found = (read(name) for name in ("image_grid_thw", "images"))
    return next((len(images) for images in found if images is not None), 0)
