"""Data parallel 2 × tensor parallel 2 must train as one process does on the same packs."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state
from torch import distributed

from launch.config import LaunchConfig
from launch.data.packed_data import read_packed_data
from launch.loop.parallel import initialize_parallel, shutdown_parallel
from tests.helpers.packed_runs import bmr_folder, losses, make_config, make_trainer
from tests.helpers.rank_processes import run_ranks

STEPS = 12
DATA_PARALLEL = 2
PACKS_PER_STEP = 4


def parallel_config(folder: Path, output: Path, **sections: Any) -> LaunchConfig:
    return make_config(
        folder,
        output,
        batch={"global_batch_packs": PACKS_PER_STEP},
        train={"iterations": STEPS},
        checkpoint={"every": STEPS // 2},
        **sections,
    )


@dataclasses.dataclass
class RankResult:
    rank: int
    tensor_rank: int
    keys: list[str]
    resumed_keys: list[str]
    once_keys: list[str]


def train_on_one_rank(folder: Path, output: Path) -> RankResult:
    """Each of four processes: a whole run, its second half again, and one pass to its end."""
    initialize_parallel(2)
    parallel = {"parallel": {"tensor": 2}}
    trainer, recorded, model = make_trainer(parallel_config(folder, output / "whole", **parallel))
    assert trainer.run()
    model.save_hf_checkpoint(output / "hf")  # type: ignore[arg-type]

    config = parallel_config(folder, output / "resumed", **parallel)
    if distributed.get_rank() == 0:
        checkpoints = output / "resumed" / "checkpoints"
        checkpoints.mkdir(parents=True)
        name, last = f"iter_{STEPS // 2:08d}", f"iter_{STEPS:08d}"
        (checkpoints / name).symlink_to(output / "whole" / "checkpoints" / name)
        # One file is damaged, which one rank reads: all ranks go on from the checkpoint before.
        shutil.copytree(output / "whole" / "checkpoints" / last, checkpoints / last)
        (checkpoints / last / "model_01.pt").write_bytes(b"")
    distributed.barrier()
    resumed, resumed_batches, _ = make_trainer(config)
    resumed.resume()
    assert resumed.iteration == STEPS // 2
    assert resumed.run()

    # 5 packs a step on 2 ranks would not be even; 2 × 3 is, and leaves one rank short at the end.
    once_config = make_config(
        folder,
        output / "once",
        data={"repeat": False},
        batch={"global_batch_packs": 6},
        train={"iterations": 1000},
        **parallel,
    )
    once, once_batches, _ = make_trainer(once_config)
    assert once.run()
    result = RankResult(
        distributed.get_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        recorded.keys,
        resumed_batches.keys,
        once_batches.keys,
    )
    parallel_state.destroy_model_parallel()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmr_folder(tmp_path_factory.mktemp("bmr"), 62)


@pytest.fixture(scope="module")
def ranks(folder: Path, bmr_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    output = tmp_path_factory.mktemp("ranks")
    results = run_ranks(4, output / "processes", train_on_one_rank, folder, output)
    return results, output


@pytest.fixture
def single_losses(folder: Path, bmr_environment: None, tmp_path: Path) -> list[float]:
    config = parallel_config(folder, tmp_path)
    initialize_parallel()
    trainer, _, _ = make_trainer(config)
    assert trainer.run()
    shutdown_parallel()
    return losses(tmp_path)


def test_four_ranks_train_as_one_process(ranks: Any, single_losses: list[float]) -> None:
    _, output = ranks
    parallel_losses = losses(output / "whole")
    assert len(parallel_losses) == len(single_losses) == STEPS
    assert parallel_losses == pytest.approx(single_losses, abs=1e-4)
    assert single_losses[-1] < single_losses[0] - 0.05  # it did train


def test_tensor_parallel_ranks_see_the_same_packs_and_data_parallel_ranks_others(
    folder: Path, ranks: Any
) -> None:
    results, _ = ranks
    first, second, third, fourth = (result.keys for result in results)
    assert [result.tensor_rank for result in results] == [0, 1, 0, 1]
    assert first == second
    assert third == fourth
    assert len(first) == len(third) == STEPS * PACKS_PER_STEP // DATA_PARALLEL
    total = read_packed_data(folder).num_packs
    epoch = [*first[: -(-total // 2)], *third[: total // 2]]
    assert len(set(epoch)) == total


def test_four_ranks_resume_bit_by_bit(ranks: Any) -> None:
    results, output = ranks
    lines = (output / "resumed" / "metrics.jsonl").read_text().splitlines()
    resumed = [json.loads(line)["loss"] for line in lines]
    assert resumed == losses(output / "whole")[STEPS // 2 :]
    for result in results:
        assert result.resumed_keys == result.keys[len(result.keys) // 2 :]


def test_one_pass_ends_on_all_ranks_with_every_pack_seen_once(folder: Path, ranks: Any) -> None:
    results, output = ranks
    total = read_packed_data(folder).num_packs
    seen = results[0].once_keys + results[2].once_keys
    assert len(seen) == len(set(seen)) == total
    lines = (output / "once" / "metrics.jsonl").read_text().splitlines()
    packs = [json.loads(line)["packs"] for line in lines]
    assert sum(packs) == total
    assert packs[-1] < 6  # the ranks did not all have packs in the last step
