"""Memory of batches is used again, but never while anything refers to it."""

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from task_encoders import buffers

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits, and small ones are kept, too."""
    buffers._waiting.clear()
    monkeypatch.setattr(buffers, "_SMALLEST", 1024)


def filled(value: int, size: int = SIZE) -> torch.Tensor:
    """A tensor as a batch has it; nothing else refers to its memory."""
    array = buffers.empty((size // 4, 4), np.uint8)
    array[:] = value
    return torch.from_numpy(array)


#: What a user may keep of a batch.
KEEPS: dict[str, Any] = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[None, 7:9].view(torch.int32),
    "numpy": lambda tensor: tensor.numpy(),
    "numpy of a view": lambda tensor: tensor[5:].numpy()[1:, :3].T,
    "memoryview": lambda tensor: memoryview(tensor.numpy()[3:]),
    "dlpack": lambda tensor: np.from_dlpack(tensor[1:]),
    "storage": lambda tensor: torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()),
    "a cycle": lambda tensor: (cycle := [tensor.numpy()], cycle.append(cycle))[0],
}


@pytest.mark.parametrize("kept", KEEPS)
def test_memory_waits_until_nothing_is_kept_of_a_batch(kept: str) -> None:
    user = KEEPS[kept](filled(1))
    gc.collect()
    others = [filled(value) for value in (2, 3)]
    content = user[0] if isinstance(user, list) else user
    assert set(np.asarray(content).tobytes()) == {1}
    del others
    assert len(buffers._waiting) == 2
    buffers._waiting.clear()
    del user, content
    gc.collect()
    (memory,) = buffers._waiting
    assert memory[0] == 1
    again = filled(4)  # `again` is the same memory
    assert not buffers._waiting
    assert memory[0] == again[0, 0] == 4


def test_the_smallest_buffer_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what waits is bounded."""
    live = [filled(1), filled(2, 2 * SIZE), *map(filled, range(3, 6))]  # the last go first
    live.clear()
    assert {len(one) for one in buffers._waiting} == {SIZE * 9 // 8, SIZE * 9 // 4}
    live.append(filled(3, SIZE + 4096))  # sizes that differ a little
    (left,) = buffers._waiting
    assert len(left) == SIZE * 9 // 4
    live.append(filled(4, 3 * SIZE))  # fits none
    assert len(buffers._waiting) == 1
    assert left[0] == 2
    buffers._waiting.clear()
    filled(1, 1020)
    monkeypatch.setattr(buffers, "_LARGEST", SIZE - 1)
    filled(1)
    assert not buffers._waiting


def test_an_object_that_is_brought_back_to_life_keeps_its_memory() -> None:
    saved = []

    class Cycle:
        def __init__(self) -> None:
            self.own, self.tensor = self, filled(1)

        def __del__(self) -> None:
            saved.append(self.tensor)

    Cycle()
    gc.collect()
    others = [filled(2), filled(3)]
    assert set(saved[0].numpy().tobytes()) == {1}
    assert len(others) == 2


def hold_and_drop(seed: int) -> int:
    """Fill, keep and drop memory at random; what is kept keeps its content. Returns checks."""
    rng, live, checks = random.Random(seed), list[tuple[int, Any]](), 0
    for number in range(150):
        value = (64 * seed + number) % 255 + 1
        tensor = filled(value, rng.choice((SIZE, SIZE + 4096, 2 * SIZE)))
        live.append((value, rng.choice((tensor, tensor[3:].numpy(), tensor[None]))))
        del tensor
        if len(live) > rng.randrange(1, 4):
            live.pop(rng.randrange(len(live)))
        for expected, part in live:
            assert part.min() == part.max() == expected
            checks += 1
    return checks


def test_contents_stay_as_they_are_under_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(hold_and_drop, range(4))) > 150
    assert buffers._waiting, "nothing was given back"


def test_a_forked_process_begins_without_its_parents_memory() -> None:
    filled(1)
    assert len(buffers._waiting) == 1
    child = os.fork()
    if not child:
        os._exit(len(buffers._waiting))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
