"""Packing while training: samples that cannot be packed beforehand, with the same planner."""

from typing import TYPE_CHECKING, Final

from task_encoders import import_on_first_use

if TYPE_CHECKING:
    from offline_packing.online.collate import padding_free_collator as padding_free_collator
    from offline_packing.online.datasets import ConstantLengthDataset as ConstantLengthDataset
    from offline_packing.online.datasets import DynamicBatches as DynamicBatches
    from offline_packing.online.datasets import PackedDatasetWrapper as PackedDatasetWrapper
    from offline_packing.online.datasets import PackedIterableDataset as PackedIterableDataset
    from offline_packing.online.datasets import PackingBlock as PackingBlock
    from offline_packing.online.energon import OnlineTaskEncoder as OnlineTaskEncoder
    from offline_packing.online.energon import get_online_train_dataset as get_online_train_dataset
    from offline_packing.online.pools import PackingPool as PackingPool
    from offline_packing.online.prefetch import Prefetched as Prefetched
    from offline_packing.online.ranks.pack_costs import pack_costs as pack_costs
    from offline_packing.online.ranks.rank_schedule import RankSchedule as RankSchedule

_MODULES: Final = {
    "ConstantLengthDataset": "datasets",
    "DynamicBatches": "datasets",
    "OnlineTaskEncoder": "energon",
    "PackedDatasetWrapper": "datasets",
    "PackedIterableDataset": "datasets",
    "PackingBlock": "datasets",
    "PackingPool": "pools",
    "Prefetched": "prefetch",
    "RankSchedule": "ranks.rank_schedule",
    "get_online_train_dataset": "energon",
    "pack_costs": "ranks.pack_costs",
    "padding_free_collator": "collate",
}
__all__ = list(_MODULES)
# Schedules need no PyTorch, and PyTorch's datasets no Energon.
__getattr__ = import_on_first_use(__name__, _MODULES)
