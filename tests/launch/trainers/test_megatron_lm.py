"""Megatron-LM's loop: what each rank reads and receives, exact states, and the losses of steps."""

from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.energon import stateless

from launch.config import DataConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron.model import build_model
from launch.trainers.megatron_lm import build_dataloaders, forward_step, get_batch
from task_encoders.energon_samples import PackedBatch
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.peers import check_losses, small_packs, two_losses
from tests.helpers.prepared_folders import text_folder
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    ROWS,
    packed_batch,
    row_samples,
    transformers_model,
    write_checkpoint,
)
from tests.world import World


def read_all(checkpoint: Path, *splits: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Return sums of the losses of each row's tokens on this rank, and their numbers, by numbers of
    tensor and context parallel ranks; only the first of the ranks that share a row has data."""
    reference = transformers_model("qwen2_vl", tied=False)
    batches = [packed_batch(row_samples(reference, row), multiple=4) for row in ROWS]
    found = []
    for tensor, context in splits:
        device = initialize_parallel(tensor, context)
        is_first = torch.distributed.get_rank() == 0
        layers: Any = {"shares_rows": context > 1, "layers_config": lambda config: config}
        model = build_model(ModelConfig(checkpoint=checkpoint), device=device, **layers)
        data_iterator = iter(batches) if is_first else None
        steps = [forward_step(data_iterator, model) for _ in ROWS]
        with pytest.raises(StopIteration):
            get_batch(data_iterator, device)
        reduced = [reduce(output_tensor) for output_tensor, reduce in steps]
        sums, counts = ([float(one[i].detach()) for one in reduced] for i in (0, 1))
        found.append((sums, counts))
        parallel_state.destroy_model_parallel()
    return found


def test_every_rank_receives_what_the_first_has_read(tmp_path: Path) -> None:
    """So that they have its losses; and ranks that share a row count each of its tokens once."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen2_vl", tied=False)
    ((sums, counts),) = read_all(checkpoint, (1, 1))
    ranks = run_ranks(2, tmp_path / "ranks", read_all, checkpoint, (2, 1), (1, 2))
    for tensor, split in zip((2, 1), zip(*ranks, strict=True), strict=True):
        found = np.sum(split, axis=0) / tensor
        assert found[1].tolist() == counts
        assert found[0] == pytest.approx(sums, rel=1e-5)


class OwnTaskEncoder(PackedTaskEncoder):
    """Somebody's: it notes what it encodes."""

    seen: ClassVar[list[str]] = []

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        self.seen.append(sample.__key__)
        return super().encode_sample(sample)


def arguments(folder: Path, **changes: Any) -> Namespace:
    """Megatron-LM's arguments that are read."""
    given = {"data_path": [str(folder)], "micro_batch_size": 1, "num_workers": 0, "eval_iters": 0}
    return Namespace(**(given | changes))


def test_steps_are_those_of_launch_and_of_the_samples_alone(
    world: World, tmp_path: Path, bmr_environment: None
) -> None:
    checkpoint = world.checkpoint("qwen2_5_vl")
    packed = small_packs("qwen2_5_vl", checkpoint, tmp_path)
    OwnTaskEncoder.seen.clear()
    encoder = build_task_encoder(
        DataConfig(path=str(packed), task_encoder=f"{__name__}:OwnTaskEncoder"),
        read_packed_data(packed),
    )
    device = initialize_parallel(1)
    data_iterator, _, _ = build_dataloaders(arguments(packed), encoder)
    model = build_model(ModelConfig(checkpoint=checkpoint, family="qwen2_5_vl"), device=device)

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        output_tensor, reduce = forward_step(iter([batch]), model)
        loss, num_tokens, _ = reduce(output_tensor)
        return loss / num_tokens

    assert data_iterator is not None
    losses = two_losses(model.train(), data_iterator, loss_of)
    check_losses(packed, checkpoint, losses, tmp_path / "ours")
    assert len(OwnTaskEncoder.seen) == 2


def keys_read(folder: Path) -> list[list[str] | None]:
    """Keys of the first four rows of this rank, alone and beside another that shares its layers;
    None where it does not read."""
    found: list[list[str] | None] = []
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    for size in (1, 2):
        initialize_parallel(size)
        train, validation, test = build_dataloaders(arguments(folder), encoder)
        assert validation is test is None
        found.append(train and [key for row in islice(train, 4) for key in row.__key__])
        parallel_state.destroy_model_parallel()
    return found


def test_ranks_read_in_the_order_written(tmp_path: Path) -> None:
    """And go on where a state was saved, as Megatron-LM saves and reads it."""
    folder = text_folder(tmp_path / "packs", 8)
    keys = [f"{i:02d}" for i in range(8)]
    first, second = run_ranks(2, tmp_path / "ranks", keys_read, folder)
    assert first == [keys[:4], keys[:4]]
    assert second == [keys[4:], None]
    initialize_parallel()
    encoder = PackedTaskEncoder(seq_length=64, settings=PackingSettings(packed=True, bmr=True))
    train, _, _ = build_dataloaders(arguments(folder, num_workers=1), encoder)
    assert train is not None
    for step in range(10):  # in an epoch, at its end, and in the next
        assert next(train).__key__ == [keys[step % 8]]
        if step in (3, 7, 9):
            torch.save({"dataloader_state_dict": train.save_state()}, tmp_path / "state.pt")
            state = arguments(folder, num_workers=1), encoder, tmp_path / "state.pt"
            rest, _, _ = build_dataloaders(*state)
            assert rest is not None
            assert [next(rest).__key__ for _ in range(2)] == [
                [keys[(step + i) % 8]] for i in (1, 2)
            ]


def test_validation_with_ones_own_encoder(captions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.delenv("OFFLINE_PACKING_BMR", raising=False)  # of other tests of the module
    initialize_parallel()
    config = DataConfig(path=str(captions), task_encoder=f"{__name__}:OwnTaskEncoder")
    encoder = build_task_encoder(config, read_packed_data(captions))
    _, validation, _ = build_dataloaders(
        arguments(captions, data_path=str(captions), eval_iters=1), encoder
    )
    assert validation is not None
    assert next(validation[0]).num_tokens > 0
    missing = config.model_copy(update={"task_encoder": "json:Nothing"})
    with pytest.raises(ValueError, match=r"json:Nothing.*name a 'module:Class'"):
        build_task_encoder(missing, read_packed_data(captions))
