"""Megatron-LM's loop: what each rank reads and receives, exact states, and the losses of steps."""

from argparse import Namespace
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
from task_encoders.energon_samples import BATCH_TENSORS, PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.peers import check_losses, small_checkpoint, small_packs, two_losses
from tests.helpers.prepared_folders import text_folder
from tests.helpers.rank_processes import run_ranks
from tests.helpers.tiny_checkpoints import (
    ROWS,
    packed_batch,
    row_samples,
    transformers_model,
    write_checkpoint,
)


def as_tensors(batch: PackedBatch) -> dict[str, Any]:
    """Inputs of a model, as tensors with memory of their own, to send to another process."""
    values = {name: getattr(batch, name) for name in BATCH_TENSORS}
    values |= vars(to_packed_seq_params(batch)) | {"keys": batch.sub_sample_keys}
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def read_all(
    checkpoint: Path, tensor: int, context: int
) -> tuple[list[dict[str, Any]], list[float], list[int]]:
    """Every batch on this rank, sums of the losses of its tokens, and their numbers; only the first
    of the ranks that share a row has data."""
    device = initialize_parallel(tensor, context)
    reference = transformers_model("qwen2_vl", tied=False)
    batches = [packed_batch(row_samples(reference, row), multiple=4) for row in ROWS]
    is_first = torch.distributed.get_rank() == 0
    data_iterator = iter(batches) if is_first else None
    received = [as_tensors(get_batch(data_iterator, device)) for _ in ROWS]
    with pytest.raises(StopIteration):
        get_batch(data_iterator, device)
    layers: Any = {"shares_rows": context > 1, "layers_config": lambda config: config}
    model = build_model(ModelConfig(checkpoint=checkpoint), device=device, **layers)
    data_iterator, sums, counts = iter(batches) if is_first else None, [], []
    for _ in ROWS:
        output_tensor, reduce = forward_step(data_iterator, model)
        loss, num_tokens, _ = reduce(output_tensor)
        sums.append(float(loss.detach()))
        counts.append(int(num_tokens))
    return received, sums, counts


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2)])
def test_every_rank_receives_what_the_first_has_read(
    tensor: int, context: int, tmp_path: Path
) -> None:
    """And ranks that share a row count each of its tokens once."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen2_vl", tied=False)
    expected, sums, counts = read_all(checkpoint, 1, 1)
    ranks = run_ranks(2, tmp_path / "ranks", read_all, checkpoint, tensor, context)
    for received, _, _ in ranks:
        for ours, theirs in zip(received, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                is_tensor = isinstance(value, torch.Tensor)
                assert torch.equal(ours[name], value) if is_tensor else ours[name] == value
                assert not is_tensor or ours[name].dtype == value.dtype
    found = np.sum([own for _, *own in ranks], axis=0) / tensor
    assert found[1].tolist() == counts
    assert found[0] == pytest.approx(sums, rel=1e-5)


class OwnTaskEncoder(PackedTaskEncoder):
    """Somebody's: it notes what it encodes."""

    seen: ClassVar[list[str]] = []

    @stateless
    def encode_sample(self, sample: Any) -> Any:
        self.seen.append(sample.__key__)
        return super().encode_sample(sample)


def test_steps_are_those_of_launch_and_of_the_samples_alone(
    tmp_path: Path, bmr_environment: None
) -> None:
    checkpoint = small_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    packed = small_packs("qwen2_5_vl", checkpoint, tmp_path)
    OwnTaskEncoder.seen.clear()
    encoder = build_task_encoder(
        DataConfig(path=str(packed), task_encoder=f"{__name__}:OwnTaskEncoder"),
        read_packed_data(packed),
    )
    device = initialize_parallel(1)
    args = Namespace(data_path=str(packed), micro_batch_size=1, num_workers=0, eval_iters=0)
    data_iterator, _, _ = build_dataloaders(args, encoder)
    model = build_model(ModelConfig(checkpoint=checkpoint, family="qwen2_5_vl"), device=device)

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        output_tensor, reduce = forward_step(iter([batch]), model)
        loss, num_tokens, _ = reduce(output_tensor)
        return loss / num_tokens

    assert data_iterator is not None
    losses = two_losses(model.train(), data_iterator, loss_of)
    check_losses(packed, checkpoint, losses, tmp_path / "ours")
    assert len(OwnTaskEncoder.seen) == 2


NUM_PACKS = 8


def arguments(folder: Path, **changes: Any) -> Namespace:
    given = {"data_path": [str(folder)], "micro_batch_size": 1, "num_workers": 0, "eval_iters": 0}
    return Namespace(**(given | changes))


def task_encoder() -> PackedTaskEncoder:
    settings = PackingSettings(packed=True, bmr=True)
    return PackedTaskEncoder(seq_length=64, settings=settings)


def keys_read(folder: Path, count: int, *tensor_parallel: int) -> list[list[str] | None]:
    """Keys of the first rows of this rank, by number of ranks that share layers; None where it does
    not read."""
    found: list[list[str] | None] = []
    for size in tensor_parallel:
        initialize_parallel(size)
        train, validation, test = build_dataloaders(arguments(folder), task_encoder())
        assert validation is test is None
        read = range(0 if train is None else count)
        keys = [key for _ in read for key in next(train).__key__]  # type: ignore[arg-type]
        found.append(keys or None)
        parallel_state.destroy_model_parallel()
    return found


def test_ranks_read_in_the_order_written(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    ((alone,),) = run_ranks(1, tmp_path / "1", keys_read, folder, NUM_PACKS, 1)
    assert alone == sorted(alone)
    assert len(set(alone)) == NUM_PACKS
    half = NUM_PACKS // 2
    assert run_ranks(2, tmp_path / "2", keys_read, folder, half, 1, 2) == [
        [alone[:half], alone[:half]],
        [alone[half:], None],
    ]


def test_a_saved_state_gives_the_rest(tmp_path: Path) -> None:
    """As Megatron-LM saves and reads it, for every step of an epoch and a half."""
    folder = text_folder(tmp_path / "packs", NUM_PACKS)
    initialize_parallel()
    train, _, _ = build_dataloaders(arguments(folder, num_workers=1), task_encoder())
    assert train is not None
    keys = []
    for step in range(12):
        keys += next(train).__key__
        torch.save({"dataloader_state_dict": train.save_state()}, tmp_path / f"{step}.pt")
    for step in (0, 3, 7, 9):
        restored, _, _ = build_dataloaders(
            arguments(folder, num_workers=1), task_encoder(), tmp_path / f"{step}.pt"
        )
        assert restored is not None
        assert next(restored).__key__ + next(restored).__key__ == keys[step + 1 : step + 3]


def test_validation_with_ones_own_encoder(captions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLINE_PACKED_DATA", "1")
    monkeypatch.delenv("OFFLINE_PACKING_BMR", raising=False)  # of other tests of the module
    initialize_parallel()
    config = DataConfig(path=str(captions), task_encoder=f"{__name__}:OwnTaskEncoder")
    encoder = build_task_encoder(config, read_packed_data(captions))
    assert isinstance(encoder, OwnTaskEncoder)
    _, validation, _ = build_dataloaders(arguments(captions, eval_iters=1), encoder)
    assert validation is not None
    assert next(validation[0]).num_tokens > 0


def test_an_encoder_that_is_not_there(captions: Path) -> None:
    config = DataConfig(path=str(captions), task_encoder="json:Nothing")
    with pytest.raises(ValueError, match=r"json:Nothing.*name a 'module:Class'"):
        build_task_encoder(config, read_packed_data(captions))
