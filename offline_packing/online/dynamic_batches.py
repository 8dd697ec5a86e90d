"""Micro batches of as many samples as a token budget holds, or of a fixed number, without padding.

    lengths 4, 2, 3, 1 and a budget of 10   [A B C D | E F | G H I | J]
    dyn_bsz=False, micro_batch_size=2       [A B C D | E F], [G H I | J]

`dyn_bsz=True` and `False` are VeOmni's two modes: the budget gives all ranks steps of similar
length; a fixed number of samples makes epochs and steps countable beforehand.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from offline_packing.online.collate import padding_free_collator
from offline_packing.online.online_dataset import OnlineDataset
from offline_packing.online.pools import FixedCount, Pool, TokenBudget
from task_encoders.field_types import Count, NonNegative, checked

Collate = Callable[[list[Any]], Any]


class DynamicBatches(OnlineDataset):
    """Micro batches, each one row of samples joined as `padding_free_collator` does.

    Args:
        dataset: as of `PackedIterableDataset`.
        dyn_bsz: True: as many samples as fit micro_batch_size × max_seq_len tokens; False: always
            micro_batch_size samples, each of at most max_seq_len tokens.
        buffer_size: samples among which those of a batch are looked for, the oldest first. A batch
            is made when there are as many, and tokens enough for it. Only for dyn_bsz.
        pad_to_length: pad every joined row with one more segment: True: to micro_batch_size ×
            max_seq_len, or a length, so that kernels are compiled for one shape.
        pad_token_id: what input_ids are padded with.
        collate: instead of `padding_free_collator`; `pad_to_length` is then its own business.
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
        collate: Collate | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **options)
        self._settings: dict[str, Any] = {
            "dyn_bsz": dyn_bsz,
            "micro_batch_size": micro_batch_size,
            "max_seq_len": max_seq_len,
            "buffer_size": buffer_size,
        }
        budget = micro_batch_size * max_seq_len
        length = budget if pad_to_length is True else pad_to_length or None
        if length is not None and length < budget:
            raise ValueError(
                f"pad_to_length is {length}, less than micro_batch_size {micro_batch_size} × "
                f"max_seq_len {max_seq_len} = {budget}, which a batch may have; set True"
            )
        self._collate = collate or partial(
            padding_free_collator, pad_to_length=length, pad_token_id=pad_token_id
        )

    def settings(self) -> dict[str, Any]:
        return dict(self._settings)

    def make_pool(self) -> Pool[Any]:
        one = self._settings
        if one["dyn_bsz"]:
            return TokenBudget(one["micro_batch_size"] * one["max_seq_len"], one["buffer_size"])
        return FixedCount(one["max_seq_len"], one["micro_batch_size"])

    def collate(self, samples: list[Any]) -> Any:
        return self._collate(samples)
