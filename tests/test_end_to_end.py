"""The whole mode on drawn data: measure, plan, write, verify, and what reads the result."""

import itertools

import pytest
import webdataset
from click.testing import CliRunner
from megatron.energon import WorkerConfig, get_loader
from megatron.energon.cli.main import main as energon

from offline_packing.demo import training
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.loading.packed_dataset import get_packed_val_dataset
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from tests.helpers.datasets import index_rows, packed_run

SEQ_LENGTH = 1024
MODEL = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
TASKS = {
    "captioning": [("pairs", "captioning")],
    "vqa": [("pairs", "vqa")],
    "bmr": [("pairs", "bmr"), ("jsonl", "bmr_jsonl/dialogues.jsonl")],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("mode")
    generate_demo_dataset(root / "data", num_samples=240, progress=False)
    output = {"packs_per_shard": 4, "split": {"train": 0.8, "val": 0.2}}
    results = {}
    for task, sources in TASKS.items():
        named = [
            {"format": form, "path": str(root / "data" / path), "task": task}
            for form, path in sources
        ]
        pack = {"seq_length": SEQ_LENGTH}
        results[task] = packed_run(named, root / task, model=MODEL, pack=pack, output=output)
    return results


def task_encoder(task: str) -> PackedTaskEncoder:
    settings = PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr")
    return PackedTaskEncoder(seq_length=SEQ_LENGTH, settings=settings, **MODEL)


@pytest.mark.parametrize("task", TASKS)
def test_nothing_is_lost_doubled_or_mismeasured(task: str, written: dict[str, Run]) -> None:
    verified = verify(written[task], deep=True)
    counts = require_manifest(written[task].workspace.root).counts
    assert verified.problems == []
    assert counts.samples == counts.packed + sum(counts.set_aside.values())
    assert counts.set_aside  # the drawn data hold samples that must be set aside
    assert verified.num_samples == counts.packed > 50


@pytest.mark.parametrize("task", TASKS)
def test_the_loader_gives_every_sample_once(task: str, written: dict[str, Run]) -> None:
    root = written[task].workspace.root
    counts = require_manifest(root).counts
    train = training.packed_train_dataset(root, task, SEQ_LENGTH, repeat=False, **MODEL)
    worker_config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    val = get_packed_val_dataset(root, task_encoder(task), worker_config=worker_config)
    batches = [*get_loader(train), *get_loader(val)]
    keys = [key for batch in batches for key in batch.sub_sample_keys]
    assert not any(batch.dropped for batch in batches)
    assert len(keys) == len(set(keys)) == counts.packed
    assert sum(batch.tokens.shape[1] for batch in batches) == counts.tokens
    assert all(batch.tokens.shape[1] <= SEQ_LENGTH for batch in batches)
    measured = {row["key"]: row["num_tokens"] for row in index_rows(written[task])}
    for batch in batches:
        lengths = batch.cu_lengths[0].diff().tolist()
        assert lengths == [measured[key] for key in batch.sub_sample_keys]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("command", [["info"], ["lint"], ["preview", "--split-parts", "train"]])
def test_energons_own_commands_accept_the_folder(
    task: str, command: list[str], written: dict[str, Run]
) -> None:
    done = CliRunner().invoke(energon, [*command, str(written[task].workspace.root)], input="n\n")
    assert done.exit_code == 0, (done.output, done.exception)


@pytest.mark.parametrize("task", TASKS)
def test_the_plain_webdataset_library_reads_every_sample(
    task: str, written: dict[str, Run]
) -> None:
    root = written[task].workspace.root
    shards = sorted(map(str, root.glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())
    packed = require_manifest(root).counts.packed
    assert sum(len(sample["json"]["captions"]) for sample in samples) == packed
    for sample in samples:
        nested = [name if isinstance(name, list) else [name] for name in sample["json"]["images"]]
        assert all(name in sample for names in nested for name in names)


@pytest.mark.parametrize("task", TASKS)
def test_packed_equals_unpacked_token_by_token(task: str, written: dict[str, Run]) -> None:
    dataset = training.packed_train_dataset(written[task].workspace.root, task, SEQ_LENGTH, **MODEL)
    batches = list(itertools.islice(get_loader(dataset), 1))
    model = training.tiny_qwen2_vl(weight_std=0.08)
    difference = training.compare_packed_with_unpacked(model, batches)
    assert difference.num_tokens > 30
    assert difference.packed <= 1e-4
    assert difference.without_boundaries >= 1e-1
