"""A loader that is saved and restored, through the calls of `launch`."""

from collections.abc import Iterable
from pathlib import Path

import torch

from launch.config import DataConfig
from launch.data.micro_batches import LoaderBatches
from launch.loop.parallel import initialize_parallel
from task_encoders.packed_task_encoder import PackedTaskEncoder

_COMPARED = 3  # packs after a restored state


def check_states(
    config: DataConfig,
    encoder: PackedTaskEncoder,
    num_packs: int,
    folder: Path,
    *,
    steps: Iterable[int] | None = None,
) -> list[str]:
    """A state saved before the first step or after any other gives the rest, across the end of an
    epoch; ``steps`` are those that are restored, by default all. Returns the keys of an epoch."""
    device = initialize_parallel()
    whole = LoaderBatches(config, encoder, device)
    states, seen = [], []
    for _ in range(num_packs + 3):
        torch.save(whole.state(), folder / "state.pt")
        states.append(torch.load(folder / "state.pt", weights_only=True))
        seen += next_keys(whole, 1)
    seen += next_keys(whole, _COMPARED - 1)
    whole.close()
    assert len(seen) == (num_packs + 2 + _COMPARED if config.repeat else num_packs)
    assert len(set(seen)) == num_packs
    for step in range(len(states)) if steps is None else steps:
        restored = LoaderBatches(config, encoder, device)
        restored.restore(states[step])
        assert next_keys(restored, _COMPARED) == seen[step : step + _COMPARED], step
        restored.close()
    return seen[:num_packs]


def next_keys(batches: LoaderBatches, count: int) -> list[str]:
    """Keys of the packs of the next steps, fewer at the end of the data."""
    rows = [batches.next() for _ in range(count)]
    return [key for row in rows if row is not None for key in row.__key__]
