"""Many questions about few pictures, from files to logits: source.merge_same_image as a whole."""

import io
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.cbook
import numpy as np
import pytest
import torch
from megatron.energon import get_loader
from PIL import Image

from offline_packing.demo.training import packed_train_dataset, tiny_qwen2_vl
from offline_packing.engines.local import LocalEngine
from offline_packing.measure import regroup
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import open_index
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.families import build_sample_encoder
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.samples import SourceSample, Turn
from tests.helpers.datasets import index_rows, make_run, pack_all
from tests.helpers.faults import KilledError, killing
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import samples_of, shard_files
from tests.helpers.tiny_checkpoints import packed_batch

logger = logging.getLogger(__name__)

MODEL = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
SEQ_LENGTH = 512
WORDS = Path(__file__).parents[1].joinpath("README.md").read_text().split()


@dataclass(frozen=True)
class Questions:
    """Records about pictures, and the bytes of these by name."""

    records: list[dict[str, Any]]
    pictures: Mapping[str, bytes]

    def run(self, root: Path, name: str, workers: int = 0, *, merged: bool = True) -> Run:
        options = {"merge_same_image": {"max_tokens": SEQ_LENGTH}} if merged else {}
        source = {"format": "jsonl", "path": str(root / "data" / "a.jsonl"), "task": "bmr"}
        return make_run(
            {**source, **options},
            root / name,
            model=MODEL,
            pack={"seq_length": SEQ_LENGTH},
            output={"packs_per_shard": 32, "key_prefix": ""},
            engine={"workers": workers, "samples_per_part": -(-len(self.records) // 8)},
        )


def questions(root: Path, num_records: int, num_pictures: int) -> Questions:
    """Records in any order; the pictures are cut from a photograph."""
    rng = np.random.default_rng(0)
    with Image.open(matplotlib.cbook.get_sample_data("grace_hopper.jpg")) as opened:
        photograph = opened.convert("RGB")
    pictures: dict[str, bytes] = {}
    for i in range(num_pictures):
        x, y = (int(rng.integers(side - 240)) for side in photograph.size)
        width, height = (int(n) for n in rng.integers(60, 240, 2))
        kind = ("JPEG", "PNG", "WEBP")[i % 3]
        buffer = io.BytesIO()
        photograph.crop((x, y, x + width, y + height)).save(buffer, kind)
        pictures[f"{i:04d}.{kind.lower()}"] = buffer.getvalue()
    assert len(set(pictures.values())) == num_pictures
    names = list(pictures)
    shown = rng.permutation(
        np.concatenate(
            [np.arange(num_pictures), rng.integers(0, num_pictures, num_records - num_pictures)]
        )
    )
    records = [
        {
            "id": f"q{i}",
            "image": names[picture],
            "question": f"<image>\n{i}: {' '.join(rng.choice(WORDS, 1 + i % 9))}?",
            "answer": " ".join(rng.choice(WORDS, 1 + i % 12)),
        }
        for i, picture in enumerate(shown.tolist())
    ]
    for name, data in pictures.items():
        write_file(root / "data" / name, data)
    write_file(root / "data" / "a.jsonl", lines(records))
    return Questions(records, pictures)


#: records and pictures
FEW, MANY = (60, 9), (5000, 700)


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Questions, Run]:
    root = tmp_path_factory.mktemp("questions")
    asked = questions(root, *request.param)
    run = asked.run(root, "merged")
    pack_all(run)
    return root, asked, run


def test_every_question_once_with_its_picture(packed: tuple[Path, Questions, Run]) -> None:
    """The tokens and bytes that are saved are also those that are said."""
    root, asked, run = packed
    found: Counter[tuple[str, str, bytes]] = Counter()
    size = 0
    for _, sample, media in samples_of(run):
        (picture,) = media
        size += len(picture)
        found.update((t.prompt.replace("<image>\n", ""), t.answer, picture) for t in sample.turns)
    expected = [
        (one["question"].removeprefix("<image>\n"), one["answer"], asked.pictures[one["image"]])
        for one in asked.records
    ]
    assert found == Counter(expected)
    info = open_index(run).info
    plain = measure(asked.run(root, "plain", merged=False))
    size_before = sum(len(picture) for _, _, picture in expected)
    assert info.saved["bytes"] == size_before - size
    assert info.saved["num_tokens"] == plain.info.num_tokens - info.num_tokens
    assert info.saved["num_images"] == len(asked.records) - info.num_samples
    assert max(row["num_tokens"] for row in index_rows(run)) <= SEQ_LENGTH
    result = verify(run, deep=True)
    assert result.ok, result.problems
    logger.info(
        "%d questions, %d pictures -> %d dialogues: tokens %d -> %d, bytes of pictures %d -> %d",
        *(len(asked.records), len(asked.pictures), info.num_samples),
        *(plain.info.num_tokens, info.num_tokens, size_before, size),
    )


def test_killed_and_resumed(
    packed: tuple[Path, Questions, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, asked, run = packed
    killed = asked.run(root, "killed")
    with monkeypatch.context() as patch:
        patch.setattr(regroup, "regroup_part", killing(regroup.regroup_part, after=3))
        with pytest.raises(KilledError):
            measure(killed)
    assert len(list(killed.workspace.index.glob("*.parquet"))) == 3
    pack_all(killed)
    assert shard_files(killed) == shard_files(run)


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [MANY], indirect=True)
@pytest.mark.parametrize("engine", ["1 worker", "4 workers", "Ray"])
def test_the_same_bytes_on_workers(engine: str, packed: tuple[Path, Questions, Run]) -> None:
    root, asked, run = packed
    workers = int(engine[0]) if engine[0].isdecimal() else 2
    other = asked.run(root, engine, workers)
    if engine == "Ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.55'")
        from offline_packing.engines.ray_cluster import RayEngine

        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("RAY_ADDRESS", raising=False)
            with RayEngine(workers) as opened:
                pack_all(replace(other, engine=opened))
    else:
        with LocalEngine(workers) as pool:
            pack_all(replace(other, engine=pool))
    assert shard_files(other) == shard_files(run)


@torch.no_grad()
def test_packed_logits_are_those_of_the_dialogues(packed: tuple[Path, Questions, Run]) -> None:
    """Dialogues put together here from the records, each alone in a real model."""
    _, asked, run = packed
    encoder = build_sample_encoder("qwen2_vl", "builtin", **MODEL)
    model = tiny_qwen2_vl(weight_std=0.08).eval()
    records = {one["id"]: one for one in asked.records}
    dialogues = {
        row["key"]: [records[part["key"]] for part in row["parts"] or [row]]
        for row in index_rows(run)
    }
    train = packed_train_dataset(run.workspace.root, "bmr", SEQ_LENGTH, repeat=False, **MODEL)
    compared = 0
    for batch in get_loader(train):
        logits = model(**to_transformers_kwargs(batch)).logits[0]
        bounds = batch.cu_lengths[0].tolist()
        for key, start, end in zip(batch.sub_sample_keys, bounds, bounds[1:], strict=False):
            alone = _alone(encoder, key, dialogues[key], asked.pictures)
            expected = model(**alone).logits[0]
            assert (logits[start:end] - expected).abs().max() <= 1e-5
            compared += len(dialogues[key]) > 1
        if compared > 1:
            break
    assert compared > 1


def _alone(
    encoder: Any, key: str, records: list[dict[str, Any]], pictures: Mapping[str, bytes]
) -> dict[str, Any]:
    """A dialogue as anyone would give it to transformers, which finds the positions."""
    first, *others = [(one["question"], one["answer"]) for one in records]
    turns = [first, *((asked.removeprefix("<image>\n"), answer) for asked, answer in others)]
    name = records[0]["image"]
    sample = SourceSample(key, "bmr", tuple(Turn(*turn) for turn in turns), (name,))
    encoded = encoder.encode(sample, [pictures[name]])
    kwargs = to_transformers_kwargs(packed_batch([encoded]))
    names = ("input_ids", "pixel_values", "image_grid_thw")
    image = encoder.media_token_ids["image_token_id"]
    types = {"mm_token_type_ids": (kwargs["input_ids"] == image).int()}
    return {name: kwargs[name] for name in names} | types
