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
import torch
from megatron.energon import SampleDecoder, get_train_dataset
from megatron.energon.errors import FatalSampleError

from launch.loop.parallel import initialize_parallel
from offline_packing.runs.manifest import require_manifest
from task_encoders.families.builtin_processor import builtin_processor, builtin_tokenizer
from task_encoders.loading.packed_dataset import get_packed_loader
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import BMR, PACKED, VQA, PackingSettingsError
from tests.helpers.datasets import captioning_pairs, make_run, mixed_pairs, pack_all
from tests.helpers.energon_batches import batches_of
from tests.helpers.pages import blocks
from tests.helpers.prepared_folders import (
    CRUDE_YAML,
    blend_of,
    folder_of,
    picture,
    vqa_pack,
    words,
    write_folder,
)

PAGE = (Path(__file__).parent.parent / "docs/energon.md").read_text()
BLOCKS = [block for block in blocks(PAGE) if block.language]
LIMITS = {"min_pixels": 3136, "max_pixels": 4014080}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The things that the page names: two packed folders, packs of others, scans, a processor."""
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


def test_the_program_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset of its last block blends packs of three folders, and scans through their own
    cooker."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(PACKED, "0")  # which the program sets, and this test restores
    program = [block.text for block in BLOCKS if block.language == "python"]
    program = [text for text in program if not text.startswith("# ")]
    assert len(program) == 3
    page: dict[str, Any] = {}
    exec("\n".join(program), page)
    found = defaultdict(list)
    for batch in itertools.islice(get_packed_loader(page["own_dataset"]), 40):
        found[str(batch.__sources__[0].dataset_path)].append(batch)
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
            generation = require_manifest(folder / "out/captioning").generation
            own = {"offline_packing": "captioning", "generation": generation}
            assert subflavors == {"origin": "web", **own}
            assert "<|im_start|>" not in text
        else:
            assert batches[0].cu_lengths.shape[1] > 2
            assert "<|im_start|>user" in text

    # Both calls give the same packs in the same order.
    energon, ours = (
        [batch.__key__ for batch in itertools.islice(get_packed_loader(page[name]), 12)]
        for name in ("dataset", "in_short")
    )
    assert energon == ours
    # The provider gives both loaders.
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
    encoder = PackedTaskEncoder(seq_length=512, max_pixels=LIMITS["max_pixels"])
    for path, is_read in READ.items():
        refused = pytest.raises((PackingSettingsError, FatalSampleError), match="set OFFLINE_")
        with contextlib.nullcontext() if is_read[line] else refused:
            batches = batches_of(path, copy.copy(encoder), count=12, repeat=True)
            assert not any(batch.dropped for batch in batches)


SIZES = {"seq_length": 512, **LIMITS, "loss_on": "all", "family": "qwen2_vl"}
CALL = {
    "batch_size": 1,
    "shuffle_buffer_size": None,
    "max_samples_per_sequence": None,
    "shuffle_over_epochs_multiplier": None,
    "parallel_shard_iters": 1,
}


def open_captions(
    encoder: type[PackedTaskEncoder] = PackedTaskEncoder, **options: Any
) -> list[Any]:
    """Batches of packed captions from Energon's own call, with some arguments for it, or for the
    task encoder."""
    sizes = {name: options.pop(name, value) for name, value in SIZES.items()}
    own: dict[str, Any] = {**CALL, **options}
    return batches_of("out/captioning", encoder(**sizes), dataset_of=get_train_dataset, **own)


@pytest.fixture
def captions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, value in ((PACKED, "1"), (VQA, "0"), (BMR, "0")):
        monkeypatch.setenv(name, value)


def test_what_stops(captions: None) -> None:
    class OwnTaskEncoder(PackedTaskEncoder):
        decoder = SampleDecoder(image_decode="pil")

    for options, said in (
        ({"packing_buffer_size": 100}, "packing_buffer_size 100: packs are packed already"),
        ({"image_decode": "pil"}, "already has a decoder"),
        ({"encoder": OwnTaskEncoder}, r"OwnTaskEncoder\.decoder is a SampleDecoder"),
        ({"family": "qwen3_vl"}, "measured with family 'qwen2_vl', the task encoder has"),
        (
            {"family": "qwen2_5_vl"},
            "measured with the tokenizer of model.family=qwen2_vl and model.processor=builtin, the "
            "task encoder has the tokenizer of model.family=qwen2_5_vl and model.processor=builtin",
        ),
        ({"loss_on": "last"}, "measured with loss_on the default, the task encoder has 'last'"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            open_captions(**options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_what_trains_the_same(captions: None, caplog: pytest.LogCaptureFixture) -> None:
    """Two packs in a row, a greater length, and another order, of which a warning speaks."""
    rows = open_captions()
    assert len(rows) > 3
    longer = open_captions(seq_length=1024)
    assert [row.tokens.tolist() for row in longer] == [row.tokens.tolist() for row in rows]
    pairs = open_captions(batch_size=2)
    tokens, segments = (
        [torch.cat([part for row in run for part in of(row)]).tolist() for run in (rows, pairs)]
        for of in (lambda row: row.tokens, lambda row: row.cu_lengths.diff())
    )
    assert tokens[0] == tokens[1]
    assert segments[0] == segments[1]
    one_by_one = open_captions(batch_size=None)
    assert [one.row.tokens.tolist() for one in one_by_one] == [r.tokens[0].tolist() for r in rows]
    assert not caplog.records
    shuffled = open_captions(shuffle_buffer_size=100)
    assert {row.__key__[0] for row in shuffled} == {row.__key__[0] for row in rows}
    assert "shuffle_buffer_size 100 undoes the order" in caplog.text
