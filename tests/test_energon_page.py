"""docs/energon.md: its blocks are one program, on data at the places that they name."""

import contextlib
import copy
import itertools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.energon import WorkerConfig
from megatron.energon.errors import FatalSampleError

from launch.parallel import initialize_parallel
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.packed_dataset import get_packed_loader, get_packed_train_dataset
from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder
from task_encoders.settings import BMR, PACKED, VQA, PackingSettingsError
from task_encoders.text.builtin_tokenizer import builtin_tokenizer
from tests.helpers.datasets import captioning_pairs, make_run, mixed_pairs, pack_all
from tests.helpers.legacy_packs import CRUDE_YAML, vqa_pack, write_folder
from tests.helpers.markdown import blocks
from tests.helpers.unpacked_folders import blend_of, folder_of, picture, words

PAGE = (Path(__file__).parent.parent / "docs/energon.md").read_text()
BLOCKS = [block for block in blocks(PAGE) if block.language]
LIMITS = {"min_pixels": 3136, "max_pixels": 4014080}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page names: two packed folders, packs of others, scans, and a processor."""
    root = tmp_path_factory.mktemp("energon")
    for task, pairs in (("captioning", captioning_pairs), ("bmr", mixed_pairs)):
        source = {"format": "pairs", "path": str(pairs(root / "pairs" / task)), "task": task}
        output = {"split": {"train": 0.8, "val": 0.2}}
        pack_all(make_run(source, root / "out" / task, model=LIMITS, output=output))
    rng = np.random.default_rng(0)
    scans = {f"scan{i}": {"jpg": picture(rng), "txt": words(rng).encode()} for i in range(4)}
    folder_of(root / "data/scans", scans, CRUDE_YAML)
    packs = {f"theirs{i}": vqa_pack(rng, f"theirs{i}", 2) for i in range(4)}
    write_folder(root / "data/their_packs", [packs], CRUDE_YAML)
    builtin_processor(min_pixels=3136, max_pixels=4014080).save_pretrained(
        root / "Qwen/Qwen2-VL-2B-Instruct"
    )
    for block in BLOCKS:
        name, _, text = block.text.partition("\n")
        if name.endswith((".yaml", ".py")):
            (root / name.removeprefix("# ")).write_text(text)
    return root


@pytest.fixture
def page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the program defines."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(PACKED, "0")  # which the program sets, and this test restores
    program = [
        block.text
        for block in BLOCKS
        if block.language == "python" and not block.text.startswith("# ")
    ]
    assert len(program) == 3
    names: dict[str, Any] = {}
    exec("\n".join(program), names)
    return names


def by_origin(batches: Any, count: int) -> dict[str, list[Any]]:
    """The first batches, by the folder that they come from."""
    found = defaultdict(list)
    for batch in itertools.islice(batches, count):
        found[str(batch.__sources__[0].dataset_path)].append(batch)
    return found


def test_packs_and_samples_blend(folder: Path, page: dict[str, Any]) -> None:
    """The dataset of the last block: packs of three folders, and scans through their own cooker."""
    found = by_origin(get_packed_loader(page["own_dataset"]), 40)
    assert {origin.removeprefix(f"{folder}/") for origin in found} == {
        "out/captioning",
        "out/bmr",
        "data/their_packs",
        "data/scans",
    }
    for origin, batches in found.items():
        assert not any(batch.dropped for batch in batches)
        subflavors = batches[0].__subflavors__[0]
        text = builtin_tokenizer().decode(batches[0].tokens[0].tolist())
        if origin.endswith("scans"):
            assert subflavors["origin"] == "scans"
            assert "Read this.<|im_end|>" in text
        elif origin.endswith("captioning"):
            assert subflavors == {"origin": "web", "offline_packing": "captioning"}
            assert "<|im_start|>" not in text
        else:
            assert batches[0].cu_lengths.shape[1] > 2
            assert "<|im_start|>user" in text


def test_both_calls_give_the_same_packs_in_the_same_order(page: dict[str, Any]) -> None:
    energon, ours = (
        [batch.__key__ for batch in itertools.islice(get_packed_loader(page[name]), 12)]
        for name in ("dataset", "in_short")
    )
    assert energon == ours


def test_the_provider_gives_both_loaders(page: dict[str, Any]) -> None:
    initialize_parallel()
    train, (valid,), test = page["train_valid_test_dataloaders_provider"](None)
    assert next(iter(train)).cu_lengths.shape[1] > 1
    keys = [key for batch in valid for key in batch.__key__]
    assert len(keys) == len(set(keys)) > 0
    assert test is None


#: The table: with each line of it, whether a folder or a blend is read.
READ = {
    "out/captioning": [False, True, False, False],
    "out/bmr": [False, False, False, True],
    "data/scans": [True, False, False, False],
    "blend.yaml": [False, True, False, False],
    "bmr_and_scans.yaml": [False, True, False, True],
}


@pytest.mark.parametrize("line", range(4))
def test_what_the_variables_do(line: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    blend_of(folder / "bmr_and_scans.yaml", [folder / "out/bmr", folder / "data/scans"])
    table = [row.split("|")[1:4] for row in PAGE.splitlines() if re.match(r"\| (1 )?\|", row)]
    for name, value in zip((PACKED, VQA, BMR), table[line], strict=True):
        monkeypatch.setenv(name, value.strip() or "0")
    encoder = Qwen2VLTaskEncoder(seq_length=512, max_pixels=LIMITS["max_pixels"])
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for path, is_read in READ.items():
        refused = pytest.raises((PackingSettingsError, FatalSampleError), match="set OFFLINE_")
        with contextlib.nullcontext() if is_read[line] else refused:
            dataset = get_packed_train_dataset(path, copy.copy(encoder), worker_config=config)
            batches = list(itertools.islice(get_packed_loader(dataset), 12))
            assert not any(batch.dropped for batch in batches)
