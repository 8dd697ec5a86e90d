"""Stage 4: packs of numbers. Each number is the length of a sequence; a pack holds 100."""

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any

import torch
from common import CONTENT, CONTENT_BESIDE, PADDING, save_picture, stage
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from offline_packing.online import PackedIterableDataset, Prefetched

MAX_LENGTH = 100
#: the document's names and ours
STRATEGIES = {"greedy": "sequential", "binpack": "first_fit_decreasing"}


class Numbers(IterableDataset[int]):
    """The numbers from `start` to before `end`; each worker has a stretch of its own."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        stretch = ceil((self.end - self.start) / num_workers)
        begin = self.start + worker * stretch
        return iter(range(begin, min(begin + stretch, self.end)))


def as_sequence(number: int) -> dict[str, int]:
    """A sequence that is nothing but its length."""
    return {"length": number}


def as_tensors(packs: list[list[dict[str, int]]]) -> list[torch.Tensor]:
    """The lengths of one pack."""
    return [torch.tensor([sequence["length"]]) for sequence in packs[0]]


def packs_of_numbers(strategy: str, num_workers: int = 0) -> list[list[torch.Tensor]]:
    """The packs of 1 to 24, made by a thread and taken from its queue."""
    packed = PackedIterableDataset(
        Numbers(1, 25),
        seq_length=MAX_LENGTH,
        strategy=STRATEGIES[strategy],
        leftovers="emit",
        encode=as_sequence,
        split=False,
    )
    return list(DataLoader(Prefetched(packed), collate_fn=as_tensors, num_workers=num_workers))


@stage
def main(data: Path, pictures: Path) -> None:
    """Print and draw the packs of both strategies."""
    found = {}
    for strategy in STRATEGIES:
        print(f"\n=== Strategy: {strategy.upper()} ===\n")
        found[strategy] = packs_of_numbers(strategy)
        for pack in found[strategy]:
            print(pack)

    def draw(*axes: Any) -> None:
        for one, (strategy, packs) in zip(axes, found.items(), strict=True):
            for row, pack in enumerate(packs):
                end = 0
                for number, length in enumerate(map(int, pack)):
                    one.barh(row, length, left=end, color=(CONTENT, CONTENT_BESIDE)[number % 2])
                    one.text(end + length / 2, row, length, ha="center", va="center", size=7)
                    end += length
                one.barh(row, MAX_LENGTH - end, left=end, color=PADDING)
            one.set_yticks(range(len(packs)), [f"pack {row + 1}" for row in range(len(packs))])
            one.invert_yaxis()
            padding = 1 - sum(map(sum, packs)) / MAX_LENGTH / len(packs)
            one.set_title(f"{strategy}: {len(packs)} packs, {float(padding):.0%} padding", size=11)

    save_picture(draw, pictures / "knapsack_packing.png", columns=2, height=2.5)


if __name__ == "__main__":
    main()
