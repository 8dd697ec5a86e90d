"""The demo dataset: same seed same bytes, the forms people have, texts true of the pixels."""

import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from offline_packing.demo import generate
from offline_packing.demo.generate import COLORS, Truth, generate_demo_dataset
from offline_packing.demo.run import MODEL, SEQ_LENGTH, SOURCES
from offline_packing.runs.artifacts import open_index
from tests.helpers.datasets import make_run, outcomes, plan_index
from tests.helpers.outputs import files_of

NUM_SAMPLES = 240
#: One sentence of a description.
SHAPE = r"One (\w+) (\w+) of radius (\d+) is centered at \((\d+), (\d+)\)\."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "data"


@pytest.fixture(scope="module")
def truth(path: Path) -> Truth:
    return generate_demo_dataset(path, seed=3, num_samples=NUM_SAMPLES, progress=False)


@pytest.fixture(scope="module")
def records(path: Path, truth: Truth) -> dict[str, dict[str, Any]]:
    """ "folder/key" -> JSON of all samples but the one that cannot be parsed."""
    files = [
        file for folder in ("captioning", "vqa", "bmr") for file in (path / folder).glob("*.json")
    ]
    texts = {f"{file.parent.name}/{file.stem}": file.read_text("utf-8") for file in sorted(files)}
    for line in (path / "bmr_jsonl" / "dialogues.jsonl").read_text("utf-8").splitlines():
        texts[f"bmr_jsonl/{json.loads(line)['id']}"] = line
    assert len(texts) == NUM_SAMPLES
    readable = (name for name in texts if truth["set_aside"].get(name) != "bad_json")
    return {name: json.loads(texts[name]) for name in readable}


def test_the_seed_alone_decides_every_byte(
    path: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a run that is interrupted, which leaves no dataset. A finished dataset is reused,
    and another is refused."""
    make = functools.partial(generate_demo_dataset, num_samples=60, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "draw_picture", None)
        with pytest.raises(TypeError):
            make(tmp_path / "a", seed=5)
    assert not (tmp_path / "a").exists()
    made = make(tmp_path / "a", seed=5)
    make(tmp_path / "b", seed=5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b"]
    first, second, other = (files_of(folder) for folder in (tmp_path / "a", tmp_path / "b", path))
    assert len(first) > 100
    assert first == second
    assert set(first.values()).isdisjoint(v for k, v in other.items() if k.endswith(".jpg"))
    written = (tmp_path / "a/truth.json").stat().st_mtime_ns
    assert make(tmp_path / "a", seed=5) == made
    assert (tmp_path / "a/truth.json").stat().st_mtime_ns == written
    (tmp_path / "foreign").mkdir()
    for name in ("a", "foreign"):
        message = "is not the demo dataset .*'seed': 1.*; remove"
        with pytest.raises(FileExistsError, match=message):
            make(tmp_path / name, seed=1)
    with pytest.raises(ValueError, match="num_samples 49 < 50"):
        make(tmp_path / "small", num_samples=49)


def test_records_have_the_forms_people_have(truth: Truth, records: dict[str, Any]) -> None:
    folders = Counter(name.split("/")[0] for name in records)
    assert folders == {"captioning": 85, "vqa": 72, "bmr": 63, "bmr_jsonl": 19}
    kinds: Counter[str] = Counter()
    for name, record in records.items():
        if name.startswith("captioning/"):
            assert list(record) in (["caption"], ["captions"])
            kinds.update(list(record))
            continue
        messages, images = record["messages"], record["images"]
        roles = [message["role"] for message in messages]
        has_system = roles[0] == "system"
        assert roles[has_system:] == ["user", "assistant"] * ((len(roles) - has_system) // 2)
        marks = "".join(m["content"] for m in messages).count("<image>")
        assert (marks in (0, len(images))) == (
            truth["set_aside"].get(name) != "image_count_mismatch"
        )
        kinds["system"] += has_system
        kinds["text_only"] += not images
        kinds["several_images"] += len(images) > 1
        kinds["no_placeholder"] += bool(images) and marks == 0
        kinds["numbered_copy"] += bool(re.fullmatch(r"vqa/\d{12}_[12]", name))
        assert name.startswith("bmr/output_") == (not images and name.startswith("bmr/"))
    assert min(kinds.values()) >= 2, kinds
    assert len(kinds) == 7


def color_at(pixels: np.ndarray, x: int, y: int) -> str:
    """The nearest color."""
    distances = {name: int(np.abs(pixels[y, x] - rgb).sum()) for name, rgb in COLORS.items()}
    return min(distances, key=distances.__getitem__)


def test_what_is_said_is_in_the_pixels(
    path: Path, truth: Truth, records: dict[str, dict[str, Any]]
) -> None:
    checked: Counter[str] = Counter()
    for name, record in records.items():
        folder, _, key = name.partition("/")
        if "images" in record:
            images = [path / folder / image for image in record["images"]]
        else:
            images = [*(path / folder).glob(f"{key}.[jp][pn]g")]
        if len(images) != 1 or name in truth["set_aside"]:
            continue
        if "messages" in record:
            texts = [message["content"] for message in record["messages"]]
        else:
            texts = [record["caption"] if "caption" in record else record["captions"][0]["content"]]
        with Image.open(images[0]) as stored:
            checked[stored.mode] += 1
            checked["turned"] += stored.getexif().get(0x0112) == 6
            pixels = np.asarray(ImageOps.exif_transpose(stored).convert("RGB")).astype(int)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert np.ptp(border, axis=0).max() < 60, name  # nothing is cut by the border
        for color, _, radius, x, y in re.findall(SHAPE, " ".join(texts)):
            for reach in (0, int(radius) // 3):
                assert color_at(pixels, int(x) + reach, int(y)) == color, name
            checked["shape"] += 1
        answers = dict(itertools.pairwise(texts))
        for question, answer in answers.items():
            if found := re.search(r"around the point \((\d+), (\d+)\)", question):
                assert color_at(pixels, *map(int, found.groups())) == answer.split()[0]
                checked["point"] += 1
        if (count := answers.get("How many shapes are there?")) and (
            listed := answers.get("List the shapes from left to right.")
        ):
            assert listed.count(",") + 1 == int(count)
            checked["count"] += 1
    assert min(checked[kind] for kind in "shape point count RGB CMYK P turned".split()) >= 5


@pytest.mark.parametrize("task", SOURCES)
def test_what_is_set_aside_was_planted(path: Path, truth: Truth, task: str, tmp_path: Path) -> None:
    """And lengths are spread wide."""
    sources = [{"format": f, "path": f"{path}/{name}", "task": task} for f, name in SOURCES[task]]
    run = make_run(sources, tmp_path, model=MODEL, pack={"seq_length": SEQ_LENGTH})
    reasons = Counter(reason for reason in outcomes(run).values() if reason != "ok")
    planted = truth["set_aside"].items()
    own = Counter(reason for name, reason in planted if name.split("/")[0].startswith(task))
    assert reasons + Counter(plan_index(run).set_aside) == own
    assert own["overlong"] > 0
    lengths = open_index(run).array("num_tokens")
    lengths = lengths[lengths <= SEQ_LENGTH]
    assert 2 * lengths.min() <= np.median(lengths) < lengths.max() / 3
