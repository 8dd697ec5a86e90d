"""A torch DataLoader whose batches a `RankSchedule` decides, with a state that can be saved."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from offline_packing.online.ranks.rank_schedule import RankSampler, RankSchedule


class ScheduledLoader:
    """One rank's micro batches, epoch after epoch: each iteration is the rest of one.

    ::

        folder = PackedFolder("out/packed", task_encoder)
        schedule = RankSchedule(*pack_costs(folder), num_ranks=8)
        loader = ScheduledLoader(folder, schedule, rank=3, num_workers=4)
        for batch in loader:  # rows, as from the Energon loader
            ...
            state = loader.state_dict()  # the next batch is the first after a restart

    Args:
        dataset: a map-style dataset of the schedule's items: a `PackedFolder`, or samples.
        collate_fn: list of items -> batch; default: the dataset's own `collate`.
        options: of `torch.utils.data.DataLoader`: num_workers, prefetch_factor, pin_memory, …
    """

    def __init__(
        self,
        dataset: Any,
        schedule: RankSchedule,
        rank: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        self._sampler = RankSampler(schedule, rank)
        self._state = self._sampler.state_dict()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._sampler,
            collate_fn=collate_fn or getattr(dataset, "collate", None),
            **{"persistent_workers": options.get("num_workers", 0) > 0, **options},
        )

    def __len__(self) -> int:
        """Micro batches in the rest of the epoch, on every rank."""
        self._sampler.load_state_dict(self._state)
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # The sampler runs ahead, since workers ask for what they will deliver later.
        self._sampler.load_state_dict(self._state)
        for batch in self._loader:
            self._state["step"] += 1
            yield batch
        self._state |= {"epoch": self._state["epoch"] + 1, "step": 0, "earlier": []}

    def close(self) -> None:
        """End the workers; another iteration would start new ones."""
        workers = self._loader._iterator  # torch has no public name for it
        if workers is not None:
            workers._shutdown_workers()  # type: ignore[attr-defined]
            self._loader._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """See `RankSampler.state_dict`; of the batches that were delivered."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RankSampler.load_state_dict`. Any number of workers goes on exactly."""
        self._sampler.load_state_dict(state)
        self._state = self._sampler.state_dict()
