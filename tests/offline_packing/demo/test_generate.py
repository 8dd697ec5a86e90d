"""The demo dataset: same seed same bytes, the forms people have, texts true of the pixels."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from offline_packing.demo import DemoTruth, contact_sheet, generate, generate_demo_dataset
from offline_packing.demo.charts import depict_chart
from offline_packing.demo.documents import depict_document
from offline_packing.demo.scenes import depict_scene, make_scene
from offline_packing.demo.words import BACKGROUNDS, COLORS, estimate_num_tokens

NUM_SAMPLES = 300
SEQ_LENGTH = 2048
PAIR_FOLDERS = ("captioning", "vqa", "bmr")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> DemoTruth:
    path = tmp_path_factory.mktemp("demo") / "data"
    return generate_demo_dataset(path, seed=3, num_samples=NUM_SAMPLES, progress=False)


def records(truth: DemoTruth, faulty: bool = False) -> dict[tuple[str, str], dict[str, Any]]:
    """(folder, key) -> JSON, without the planted faults unless asked for; never the broken one."""
    found = {}
    for folder in PAIR_FOLDERS:
        for path in sorted((truth.path / folder).glob("*.json")):
            reason = planted(truth).get((folder, path.stem))
            if reason is None or (faulty and reason != "bad_json"):
                found[folder, path.stem] = json.loads(path.read_text("utf-8"))
    for line in jsonl_lines(truth):
        record = json.loads(line)
        if faulty or ("bmr_jsonl", record["id"]) not in planted(truth):
            found["bmr_jsonl", record["id"]] = record
    return found


def jsonl_lines(truth: DemoTruth) -> list[str]:
    return (truth.path / "bmr_jsonl" / "dialogues.jsonl").read_text("utf-8").splitlines()


def planted(truth: DemoTruth) -> dict[tuple[str, str], str]:
    return {(fault.folder, fault.key): fault.reason for fault in truth.set_aside}


def upright(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def nearest_color(pixel: tuple[int, ...]) -> str:
    return min(COLORS, key=lambda name: float(np.linalg.norm(np.subtract(COLORS[name].rgb, pixel))))


def caption_of(record: dict[str, Any]) -> str:
    return record["caption"] if "caption" in record else record["captions"][0]["content"]


def texts_of(record: dict[str, Any]) -> list[str]:
    if "messages" in record:
        return [message["content"] for message in record["messages"]]
    return [caption_of(record)]


def hashes(path: Path) -> dict[str, str]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_the_seed_alone_decides_every_byte(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (5, 5, 6), strict=True):
        generate_demo_dataset(path, seed=seed, num_samples=60, progress=False)
    first, second, other = map(hashes, paths)
    assert len(first) > 100
    assert first == second
    assert set(first.values()).isdisjoint(v for k, v in other.items() if k.endswith(".jpg"))


def test_files_on_disk_are_the_ones_in_the_truth(truth: DemoTruth) -> None:
    counts = {f: len(list((truth.path / f).glob("*.json"))) for f in PAIR_FOLDERS}
    counts["bmr_jsonl"] = len(jsonl_lines(truth))
    assert counts == truth.num_samples_by_folder
    assert sum(counts.values()) == NUM_SAMPLES
    assert counts == pytest.approx(
        {"captioning": 105, "vqa": 90, "bmr": 81, "bmr_jsonl": 24}, abs=1
    )
    names = {str(p.relative_to(truth.path)) for s in ("jpg", "png") for p in _glob(truth.path, s)}
    assert names == set(truth.images)
    files = [p for p in truth.path.rglob("*") if p.is_file() and p.name != "truth.json"]
    assert sum(p.stat().st_size for p in files) == truth.num_bytes
    assert DemoTruth.read(truth.path) == truth


def _glob(path: Path, suffix: str) -> list[Path]:
    return list(path.rglob(f"*.{suffix}"))


def test_one_jpeg_in_twenty_is_stored_rotated(truth: DemoTruth) -> None:
    num_jpegs = sum(name.endswith(".jpg") for name in truth.images)
    assert len(truth.exif_rotated) == (num_jpegs + 10) // 20
    assert len(truth.exif_rotated) >= 3
    assert {truth.images[name].orientation for name in truth.exif_rotated} == {3, 6, 8}
    for name, image in truth.images.items():
        with Image.open(truth.path / name) as file:
            assert file.getexif().get(0x0112, 1) == image.orientation
            swapped = image.orientation in (6, 8)
            assert file.size == (image.size[::-1] if swapped else image.size)


def test_pairs_and_lines_have_their_forms(truth: DemoTruth) -> None:
    kinds: Counter[str] = Counter()
    for (folder, key), record in records(truth).items():
        if folder == "captioning":
            assert list(record) in (["caption"], ["captions"])
            assert caption_of(record).strip()
            stems = [p for p in truth.images if p.rsplit(".", 1)[0] == f"captioning/{key}"]
            assert len(stems) == 1
            kinds[next(iter(record))] += 1
            continue
        messages, images = record["messages"], record["images"]
        assert all(f"{folder}/{name}" in truth.images for name in images)
        roles = [message["role"] for message in messages]
        has_system = roles[0] == "system"
        turns = roles[has_system:]
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert 1 <= len(turns) // 2 <= 8
        assert all(message["content"].strip() for message in messages)
        in_user = sum(m["content"].count("<image>") for m in messages if m["role"] == "user")
        assert sum(m["content"].count("<image>") for m in messages) == in_user
        assert in_user in (0, len(images))
        kinds["system"] += has_system
        kinds["text_only"] += not images
        kinds["several_images"] += len(images) > 1
        kinds["no_placeholder"] += bool(images) and in_user == 0
        if folder == "bmr" and not images:
            assert re.fullmatch(r"output_\d{8}", key)
        if folder == "vqa":
            assert images[0].rsplit(".", 1)[0] == key
            kinds["numbered_copy"] += "_" in key
    wanted = ("caption", "captions", "system", "text_only", "several_images", "numbered_copy")
    assert all(kinds[kind] >= 3 for kind in wanted), kinds
    assert kinds["no_placeholder"] >= 1


def test_numbered_copies_ask_different_things_about_one_picture(truth: DemoTruth) -> None:
    vqa = {key: record for (folder, key), record in records(truth).items() if folder == "vqa"}
    copies = [key for key in vqa if key.endswith("_1")]
    assert copies
    for key in copies:
        others = [other for other in (key[:-2], f"{key[:-2]}_2") if other in vqa]
        for other in others:
            assert texts_of(vqa[key])[0] != texts_of(vqa[other])[0]
            mine, its = (truth.images[f"vqa/{vqa[k]['images'][0]}"] for k in (key, other))
            assert (mine.size, mine.objects) == (its.size, its.objects)


def test_every_object_in_the_truth_is_in_the_pixels(truth: DemoTruth) -> None:
    faulty = {fault.key for fault in truth.set_aside}
    num_objects = num_rotated = 0
    for name, image in truth.images.items():
        if Path(name).stem in faulty:
            continue
        picture = upright(truth.path / name)
        assert picture.size == image.size
        for item in image.objects:
            pixel = picture.getpixel(tuple(item["center"]))
            assert nearest_color(pixel) == item["color"], (name, item, pixel)  # type: ignore[arg-type]
            num_objects += 1
            num_rotated += image.orientation != 1
    assert num_objects > 500
    assert num_rotated > 10


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"there is an? (\w+) \w+, centered at \((\d+), (\d+)\)", {c: c for c in COLORS}),
        (
            r"有一个(\w\w)\w+，中心在\((\d+), (\d+)\)",
            {color.zh: name for name, color in COLORS.items()},
        ),
    ],
    ids=["english", "chinese"],
)
def test_what_a_caption_says_is_in_the_pixels(
    truth: DemoTruth, pattern: str, names: dict[str, str]
) -> None:
    num_statements = 0
    for (folder, key), record in records(truth).items():
        if folder != "captioning":
            continue
        statements = re.findall(pattern, caption_of(record))
        if not statements:
            continue
        name = next(n for n in truth.images if n.rsplit(".", 1)[0] == f"captioning/{key}")
        picture = upright(truth.path / name)
        for color, x, y in statements:
            pixel = picture.getpixel((int(x), int(y)))
            assert nearest_color(pixel) == names[color]  # type: ignore[arg-type]
            num_statements += 1
    assert num_statements > 20


def test_counting_answers_agree_with_the_truth(truth: DemoTruth) -> None:
    num_checked = 0
    for (folder, _), record in records(truth).items():
        if folder != "vqa":
            continue
        question, answer = texts_of(record)
        objects = truth.images[f"vqa/{record['images'][0]}"].objects
        match = re.search(r"How many (\w+) shapes can you count|图中有几个(\w\w)的图形", question)
        if match:
            zh_names = {color.zh: name for name, color in COLORS.items()}
            color = match[1] or zh_names[match[2]]
            assert answer == str(sum(item["color"] == color for item in objects))
            num_checked += 1
        elif "How many shapes are there?" in question or "图中有多少个图形" in question:
            assert answer == str(len(objects))
            num_checked += 1
    assert num_checked >= 5


@pytest.mark.parametrize("seed", range(25))
def test_nothing_drawn_reaches_the_border(seed: int) -> None:
    """Text or shapes that do would be cut."""
    rng = Random(seed)
    size = (rng.randint(60, 500), rng.randint(60, 500))
    scene = make_scene(Random(seed), size)
    pictures = {
        BACKGROUNDS[scene.background].rgb: depict_scene(Random(seed), size, "en").image,
        (255, 255, 255): depict_chart(rng, size, "en").image,
    }
    for ground, picture in pictures.items():
        pixels = np.asarray(picture)
        frame = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (frame == ground).all()


def test_documents_keep_their_text_inside() -> None:
    for seed in range(30):
        pixels = np.asarray(depict_document(Random(seed), (120, 120), "en").image.convert("L"))
        # Table rules are pale and may reach the border; ink is dark.
        assert pixels[:, [0, -1]].min() > 150
        assert pixels.min() < 100


def test_planted_faults_are_what_they_claim(truth: DemoTruth) -> None:
    by_reason = {fault.reason: fault for fault in truth.set_aside}
    assert Counter(fault.reason for fault in truth.set_aside) == {
        "overlong": 5,
        "bad_json": 1,
        "missing_image": 1,
        "truncated_image": 1,
        "image_count_mismatch": 1,
        "empty_answer": 1,
    }
    broken = by_reason["bad_json"]
    with pytest.raises(json.JSONDecodeError):
        json.loads((truth.path / broken.folder / f"{broken.key}.json").read_bytes())
    with Image.open(truth.path / "captioning" / f"{by_reason['truncated_image'].key}.jpg") as image:
        assert image.size[0] > 0  # the header is whole
        with pytest.raises(OSError, match="truncated"):
            image.load()
    found = records(truth, faulty=True)
    missing = by_reason["missing_image"]
    name = found[missing.folder, missing.key]["images"][0]
    assert not (truth.path / missing.folder / name).exists()
    mismatch = by_reason["image_count_mismatch"]
    record = found[mismatch.folder, mismatch.key]
    assert "".join(texts_of(record)).count("<image>") not in (0, len(record["images"]))
    empty = by_reason["empty_answer"]
    assert texts_of(found[empty.folder, empty.key])[-1] == ""


def test_only_the_overlong_samples_exceed_the_demo_sequence(truth: DemoTruth) -> None:
    dashscope = pytest.importorskip("dashscope")
    tokenizer = dashscope.get_tokenizer("qwen-7b-chat")
    estimated, actual = 0, 0
    for (folder, key), record in records(truth, faulty=True).items():
        texts = texts_of(record)
        num_text_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        estimated += sum(map(estimate_num_tokens, texts))
        actual += num_text_tokens
        # <|im_start|>, role, newline, <|im_end|>, newline per message; default system prompt.
        overhead = 5 * len(texts) + 11
        pictures = record.get("images") or _captioned(truth, folder, key, record)
        num_image_tokens = sum(_image_tokens(truth, f"{folder}/{name}") for name in pictures)
        if planted(truth).get((folder, key)) == "overlong":
            assert num_text_tokens > SEQ_LENGTH
        else:
            assert num_text_tokens + num_image_tokens + overhead <= SEQ_LENGTH, key
    assert estimated == pytest.approx(actual, rel=0.1)


def _captioned(truth: DemoTruth, folder: str, key: str, record: dict[str, Any]) -> list[str]:
    if "messages" in record:
        return []
    return [Path(name).name for name in truth.images if name.rsplit(".", 1)[0] == f"{folder}/{key}"]


def _image_tokens(truth: DemoTruth, name: str) -> int:
    if name not in truth.images:
        return 0
    width, height = truth.images[name].size
    return max(4, round(width / 28) * round(height / 28)) + 2


def test_lengths_and_sizes_are_spread_wide(truth: DemoTruth) -> None:
    good = records(truth)
    lengths = np.array([sum(map(estimate_num_tokens, texts_of(r))) for r in good.values()])
    assert lengths.min() < 15
    assert np.median(lengths) < 150
    assert np.quantile(lengths, 0.95) > 400
    assert lengths.max() > 1000
    assert len(set(lengths.tolist())) > 100
    sizes = np.array([image.size for image in truth.images.values()])
    assert sizes.min() < 60
    assert sizes.max() > 600
    assert (sizes.max(axis=1) / sizes.min(axis=1)).max() > 7
    chinese = sum(bool(re.search("[\u4e00-\u9fff]", "".join(texts_of(r)))) for r in good.values())
    assert 0.2 < chinese / len(good) < 0.4


def test_a_finished_dataset_is_reused_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    first = generate_demo_dataset(path, num_samples=50, progress=False)
    written = (path / "truth.json").stat().st_mtime_ns
    assert generate_demo_dataset(path, num_samples=50, progress=False) == first
    assert (path / "truth.json").stat().st_mtime_ns == written
    with pytest.raises(FileExistsError, match=r"holds the demo dataset .* wanted \(1, 50, \d+\)"):
        generate_demo_dataset(path, seed=1, num_samples=50, progress=False)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with pytest.raises(FileExistsError, match="is no demo dataset; remove"):
        generate_demo_dataset(foreign, num_samples=50, progress=False)
    with pytest.raises(ValueError, match="num_samples 49 < 50"):
        generate_demo_dataset(tmp_path / "small", num_samples=49, progress=False)


def test_an_interrupted_run_leaves_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"

    def fail(*_: object) -> bytes:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(generate, "_encode", fail)
        with pytest.raises(OSError, match="disk full"):
            generate_demo_dataset(path, num_samples=50, progress=False)
    assert not path.exists()
    generate_demo_dataset(path, num_samples=50, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]


def test_contact_sheet_shows_the_pictures_upright(truth: DemoTruth, tmp_path: Path) -> None:
    names = truth.exif_rotated[:2]
    out = contact_sheet([truth.path / n for n in names], tmp_path / "sheet.png", num_columns=1)
    with Image.open(out) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    assert pixels.shape == (2 * 250, 232, 3)
    for row, name in enumerate(names):
        picture = upright(truth.path / name)
        picture.thumbnail((220, 220))
        left, top = 6 + (220 - picture.width) // 2, 250 * row + 6 + (220 - picture.height) // 2
        shown = pixels[top : top + picture.height, left : left + picture.width]
        # The outline may cover the last row and column.
        assert (shown[:-1, :-1] == np.asarray(picture)[:-1, :-1]).all()
    with pytest.raises(ValueError, match="no pictures given"):
        contact_sheet([], tmp_path / "none.png")
