"""The same packs as ms-swift's and VeOmni's own code, on random lists.

Their modules import whole trainers; what the compared functions do not use is replaced.
"""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from offline_packing.online.datasets import DynamicBatches, PackedIterableDataset
from tests.helpers.online_samples import Stream, numbered
from tests.peers import Say

VERSION = "Packing while training"
NUM_LISTS = 200


def load_module(monkeypatch: pytest.MonkeyPatch, name: str, unused: Sequence[str]) -> Any:
    """A module of another project, whose imports named here are stand-ins."""
    package, _, inner = name.partition(".")
    found: Any = importlib.util.find_spec(package)  # which imports nothing
    path = Path(found.origin).parent / f"{inner.replace('.', '/')}.py"
    for other in unused:
        monkeypatch.setitem(sys.modules, other, MagicMock(__path__=[]))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def random_lists(seed: int, longest: float) -> Iterator[tuple[list[int], int, int]]:
    """Lengths, capacity, samples at a time."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_LISTS):
        capacity = int(rng.integers(5, 200))
        lengths = rng.integers(1, int(capacity * longest) + 1, rng.integers(1, 150))
        yield lengths.tolist(), capacity, int(rng.integers(1, 50))


@pytest.mark.parametrize("strategy", ["binpack", "sequential"])
def test_packs_equal_those_of_ms_swift(
    strategy: str, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    unused = ("swift", "swift.template", "swift.utils")
    swift = load_module(monkeypatch, "swift.dataset.packing", unused)
    for lengths, capacity, window in random_lists(0, 1.0):
        queue = MagicMock()
        monkeypatch.setattr(swift.PackingDataset, "PACKING_BATCH_SIZE", window)
        swift.PackingDataset.create_packed_idx(0, 0, lengths, queue, capacity, strategy)
        given_out = [call.args[0][1] for call in queue.put.call_args_list]
        expected = [[number for number, _ in pack] for packs in given_out for pack in packs]
        packed = PackedIterableDataset(
            numbered(lengths), seq_length=capacity, buffer_size=window, strategy=strategy
        )
        assert [[sample["number"] for sample in pack] for pack in packed] == expected
    version = importlib.metadata.version("ms-swift")
    say(f"equal packs of {NUM_LISTS} lists to ms-swift {version}, {strategy}")


def test_batches_equal_those_of_veomni(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    unused = ("datasets", "datasets.distributed", "hdfs_io", "veomni", "veomni.data")
    unused += ("veomni.utils", "veomni.utils.registry", "veomni.utils.logging")
    unused += ("veomni.utils.constants", "veomni.utils.dist_utils", "veomni.distributed")
    unused += ("veomni.distributed.parallel_state", "veomni.utils.multisource_utils")
    veomni = load_module(monkeypatch, "veomni.data.dataset", unused)
    for lengths, budget, threshold in random_lists(1, 1.2):
        samples: IterableDataset[Any] = Stream(numbered(lengths))
        expected = veomni.DynamicBatchingSizeDataset(
            samples,
            budget,
            threshold,
            list,
            save_by_idx=False,
            get_length_fn=lambda sample: sample["length"],
            get_physical_length_fn=None,
        )
        found = DynamicBatches(samples, max_seq_len=budget, buffer_size=threshold, collate=list)
        assert list(found) == list(expected)
    version = importlib.metadata.version("veomni")
    say(f"equal batches of {NUM_LISTS} lists to VeOmni {version}")
