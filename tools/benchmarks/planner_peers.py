"""Packing functions of other projects, called the way those projects call them.

Each takes lengths as a list and returns packs as lists of sample indices. A project that is not
installed is named as missing; nothing is installed from here. A project whose method sees only some
samples at a time has two rows: the method on all of them, and the project's own use of it.

Checked against the sources at these commits: ms-swift 3602360, TRL f2cd577, LLaMA-Factory ff6d4d1,
LightBinPack 0e19c12, binpacking 0eadddd.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

PeerFunction = Callable[[Sequence[int], int], Sequence[Sequence[int]]]


class Peer(NamedTuple):
    """A packing function of another project."""

    function: PeerFunction
    package: str
    #: beyond this many samples it takes too long to be measured
    max_samples: int


def load_file(path: Path) -> ModuleType:
    """One file of a project, without the rest of its package."""
    spec = importlib.util.spec_from_file_location(f"source_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _lightbinpack(name: str) -> PeerFunction:
    def pack(lengths: Sequence[int], seq_length: int) -> Sequence[Sequence[int]]:
        import lightbinpack

        return getattr(lightbinpack, name)(lengths, seq_length)

    return pack


def _trl(lengths: Sequence[int], seq_length: int) -> Sequence[Sequence[int]]:
    """Best-fit-decreasing of trl; the rows carry sample indices in place of tokens."""
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    ids = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(rows))
    packed = _pack_bfd(pa.table({"input_ids": ids}), seq_length)
    column = packed["input_ids"].combine_chunks()
    values = column.values.to_numpy()
    ends = column.offsets.to_numpy()
    return [np.unique(values[a:b]).tolist() for a, b in pairwise(ends)]


def _binpacking(lengths: Sequence[int], seq_length: int) -> Sequence[Sequence[int]]:
    """Pack as ms-swift does, by (index, length) pairs."""
    import binpacking

    packs = binpacking.to_constant_volume(list(enumerate(lengths)), seq_length, weight_pos=1)
    return [[index for index, _ in pack] for pack in packs]


def ms_swift(
    lengths: Sequence[int], seq_length: int, window: int = 1000
) -> Sequence[Sequence[int]]:
    """PackingDataset.create_packed_idx: ``window`` samples at a time (PACKING_BATCH_SIZE); the last
    pack of every window but the last is taken apart, its samples come first in the next one."""
    import binpacking

    packs: list[list[tuple[int, int]]] = []
    carried: list[tuple[int, int]] = []
    samples = list(enumerate(lengths))
    for start in range(0, len(samples), window):
        waiting = carried + samples[start : start + window]
        packs += binpacking.to_constant_volume(waiting, seq_length, weight_pos=1)
        carried = packs.pop() if start + window < len(samples) else []
    return [[index for index, _ in pack] for pack in packs]


def in_batches(pack: PeerFunction) -> PeerFunction:
    """Every 1,000 samples separately, as `Dataset.map` with batches calls a function."""

    def pack_batches(lengths: Sequence[int], seq_length: int) -> Sequence[Sequence[int]]:
        return [
            [start + index for index in indices]
            for start in range(0, len(lengths), _BATCH)
            for indices in pack(lengths[start : start + _BATCH], seq_length)
        ]

    return pack_batches


def _llamafactory(lengths: Sequence[int], seq_length: int) -> Sequence[Sequence[int]]:
    spec = importlib.util.find_spec("llamafactory")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'llamafactory'", name="llamafactory")
    return greedy_knapsack(Path(spec.origin).parent, lengths, seq_length)


def greedy_knapsack(
    package: Path, lengths: Sequence[int], seq_length: int
) -> Sequence[Sequence[int]]:
    """LLaMA-Factory's greedy knapsack; it returns lengths, which its caller maps to indices."""
    module = load_file(package / "data/processor/processor_utils.py")
    waiting: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        waiting.setdefault(length, []).append(index)
    packs = module.greedy_knapsack(list(lengths), seq_length)
    return [[waiting[length].pop() for length in pack] for pack in packs]


#: PACKING_BATCH_SIZE of ms-swift, preprocessing_batch_size of LLaMA-Factory, batch_size of
#: `datasets.Dataset.map`, which TRL's pack_dataset leaves at its default
_BATCH = 1000

#: the strategies of this project that are measured by default
OWN = ("auto", "best_fit_decreasing")

PEERS: dict[str, Peer] = {
    "lightbinpack obfd": Peer(_lightbinpack("obfd"), "lightbinpack", 10_000_000),
    "lightbinpack obfdp": Peer(_lightbinpack("obfdp"), "lightbinpack", 10_000_000),
    "trl bfd": Peer(_trl, "trl", 100_000),
    "trl (batches of 1,000)": Peer(in_batches(_trl), "trl", 100_000),
    "binpacking": Peer(_binpacking, "binpacking", 10_000),
    "ms-swift (windows of 1,000, last pack carried)": Peer(ms_swift, "binpacking", 100_000),
    "llamafactory greedy_knapsack": Peer(_llamafactory, "llamafactory", 1_000_000),
    "llamafactory (batches of 1,000)": Peer(in_batches(_llamafactory), "llamafactory", 1_000_000),
}


def missing_packages() -> list[str]:
    """Packages of peers that are not installed."""
    packages = sorted({peer.package for peer in PEERS.values()})
    return [package for package in packages if importlib.util.find_spec(package) is None]
