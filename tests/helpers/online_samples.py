"""Samples without content, in a dataset of each kind that packing while training reads."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset


def lettered(*lengths: int) -> list[dict[str, Any]]:
    """Samples of these lengths whose tokens count on: [1 2 3 4], [5 6], ... for 4, 2, ..."""
    parts = torch.arange(1, sum(lengths) + 1).split(list(lengths)) if lengths else ()
    return [{"input_ids": part, "labels": part.clone(), "length": len(part)} for part in parts]


def numbered(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Samples that are only a number and a length."""
    return [{"number": number, "length": int(n)} for number, n in enumerate(lengths)]


def numbers(packs: Any) -> list[list[int]]:
    """The numbers of the samples of each pack."""
    return [[sample["number"] for sample in pack] for pack in packs]


class Indexed(Dataset[Any]):
    """Map-style, as a trainer's dataset that encodes lazily; counts what it is asked for."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        sample = self._samples[index]
        if isinstance(sample, Exception):
            raise sample
        return sample


class Stream(IterableDataset[Any]):
    """Iterable, without a state."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class SavableStream(IterableDataset[Any]):
    """Iterable, with a state; counts what it gives."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples
        self._begin = self._next = 0
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self._next, self._begin = self._begin, 0
        while self._next < len(self._samples):
            self._next += 1
            self.given += 1
            yield self._samples[self._next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["next"]
