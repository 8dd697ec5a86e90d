"""The demo dataset: same seed same bytes, the forms people have, texts true of the pixels."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageOps

from offline_packing.demo import generate
from offline_packing.demo.generate import Truth, estimate_num_tokens, generate_demo_dataset

NUM_SAMPLES = 400
SEQ_LENGTH = 2048
PHRASES = yaml.safe_load(Path(generate.__file__).with_name("phrases.yaml").read_text("utf-8"))
COLORS = PHRASES["drawn"]["colors"]


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


def texts_of(record: dict[str, Any]) -> list[str]:
    if "messages" in record:
        return [message["content"] for message in record["messages"]]
    return [record["caption"] if "caption" in record else record["captions"][0]["content"]]


def images_of(truth: Truth, name: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Ground truth of a sample's images."""
    if "images" in record:
        paths = [f"{name.split('/')[0]}/{image}" for image in record["images"]]
        return [truth["images"][path] for path in paths if path in truth["images"]]
    return [
        truth["images"][f"{name}.{s}"] for s in ("jpg", "png") if f"{name}.{s}" in truth["images"]
    ]


def upright(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def hashes(path: Path) -> dict[str, str]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_the_seed_alone_decides_every_byte(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        generate_demo_dataset(tmp_path / name, seed=seed, num_samples=60, progress=False)
    first, second, other = (hashes(tmp_path / name) for name in "abc")
    assert len(first) > 100
    assert first == second
    assert set(first.values()).isdisjoint(v for k, v in other.items() if k.endswith(".jpg"))


def test_records_have_the_forms_people_have(truth: Truth, records: dict[str, Any]) -> None:
    folders = Counter(name.split("/")[0] for name in records)
    assert folders == {"captioning": 140, "vqa": 120, "bmr": 107, "bmr_jsonl": 32}
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
        kinds["interleaved"] += len(images) > 1 and messages[-2]["content"].startswith("<image>")
        kinds["no_placeholder"] += bool(images) and marks == 0
        kinds["numbered_copy"] += bool(re.fullmatch(r"vqa/\d{12}_[12]", name))
        assert name.startswith("bmr/output_") == (not images and name.startswith("bmr/"))
    assert min(kinds.values()) >= 2, kinds
    assert len(kinds) == 8


def test_what_the_truth_says_is_in_the_pixels(path: Path, truth: Truth) -> None:
    drawn: Counter[str] = Counter()
    for name, image in truth["images"].items():
        if name.rsplit(".", 1)[0] in truth["set_aside"]:
            continue
        pixels = np.asarray(upright(path / name)).astype(int)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        if "objects" in image:  # nothing is cut by the border
            assert np.ptp(border, axis=0).max() < 60, name
        else:
            assert border.min() > 120, name  # rules and shades may touch it, text may not
            assert pixels.min() < 110, name
        for item in image.get("objects", []):
            x, y = item["center"]
            distances = {k: np.abs(pixels[y, x] - rgb).sum() for k, rgb in COLORS.items()}
            assert min(distances, key=distances.__getitem__) == item["color"], (name, item)
            drawn["turned"] += image["orientation"] != 1
            drawn[image["mode"]] += 1
        drawn.update(image.keys() & {"values", "lines"})
    assert (
        min(drawn[kind] for kind in ("turned", "RGB", "P", "CMYK", "RGBA", "values", "lines")) > 10
    )


def statements(truth: Truth, records: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(question or "", sentence or answer, truth of the picture) of samples with one picture."""
    for name, record in records.items():
        images = images_of(truth, name, record)
        if len(images) == 1 and name not in truth["set_aside"]:
            texts = texts_of(record)[-2:]
            yield (texts[0] if len(texts) == 2 else "", texts[-1], images[0])


def pattern(phrase: str) -> str:
    """A phrase as a regular expression with a group for each blank."""
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(phrase))


@pytest.mark.parametrize("language", ["en", "zh", "es"])
def test_what_is_said_is_what_was_drawn(
    language: str, truth: Truth, records: dict[str, Any]
) -> None:
    phrases, checked = PHRASES[language], Counter[str]()
    for question, text, image in statements(truth, records):
        for found in re.finditer(pattern(phrases["place"]), text):
            item = {"center": [int(found["x"]), int(found["y"])], "radius": int(found["radius"])}
            (drawn,) = (o for o in image.get("objects", []) if o["center"] == item["center"])
            colors, shapes = phrases["color"][drawn["color"]], phrases["shape"][drawn["shape"]]
            assert found["name"] == phrases["object"].format(color=colors, shape=shapes)
            assert drawn["radius"] == item["radius"]
            checked["place"] += 1
        for found in re.finditer(f"(?m)(?:^| |。){pattern(phrases['value'])}", text):
            if "values" in image and found["name"] in image["values"]:
                assert image["values"][found["name"]] == int(found["value"])
                checked["value"] += 1
        for line in re.finditer(pattern(phrases["line"]) + r"(?=$|\n|第| Line| La línea)", text):
            assert image["lines"][int(line["i"]) - 1] == line["text"]
            checked["line"] += 1
        checked += answers_checked(phrases, question, text, image)
    assert min(checked[kind] for kind in ("place", "value", "line")) > 5, checked
    assert checked["answer"] >= (15 if language == "en" else 2), checked


def answers_checked(
    phrases: dict[str, Any], question: str, answer: str, image: dict[str, Any]
) -> Counter[str]:
    """One answer, compared with the truth, where the question is one of those known here."""
    asked = question.removeprefix("<image>\n").removesuffix(phrases["short"])
    values, lines, objects = (image.get(k) for k in ("values", "lines", "objects"))
    truths: dict[str, Any] = {
        phrases["ask_count"]: objects and len(objects),
        phrases["ask_highest"]: values and max(values, key=values.get),
        phrases["ask_lowest"]: values and min(values, key=values.get),
        phrases["ask_lines"]: lines and len(lines),
        phrases["ask_text"]: lines and "\n".join(lines),
    }
    for name, value in (values or {}).items():
        truths[phrases["ask_value"].format(name=name)] = value
    for color, name in phrases["color"].items() if objects else ():
        count = sum(item["color"] == color for item in objects)
        truths[phrases["ask_color"].format(color=name)] = count
    if asked not in truths:
        return Counter()
    assert answer == str(truths[asked]), (asked, image)
    return Counter(answer=1)


def test_planted_faults_are_what_they_claim(
    path: Path, truth: Truth, records: dict[str, Any]
) -> None:
    by_reason = {reason: name for name, reason in truth["set_aside"].items()}
    assert Counter(truth["set_aside"].values()) == {
        "overlong": 5,
        **dict.fromkeys(["bad_json", "missing_image", "truncated_image"], 1),
        **dict.fromkeys(["image_count_mismatch", "empty_answer"], 1),
    }
    with pytest.raises(json.JSONDecodeError):
        json.loads((path / f"{by_reason['bad_json']}.json").read_bytes())
    cut = path / f"{by_reason['truncated_image']}.jpg"
    with Image.open(cut) as image, pytest.raises(OSError, match="truncated"):
        image.load()  # while its header is whole
    missing = by_reason["missing_image"]
    assert not (path / "vqa" / records[missing]["images"][0]).exists()
    assert texts_of(records[by_reason["empty_answer"]])[-1] == ""


def test_lengths_are_spread_wide_and_only_the_overlong_are_too_long(
    truth: Truth, records: dict[str, Any]
) -> None:
    import dashscope  # takes 2 s

    tokenizer = dashscope.get_tokenizer("qwen-7b-chat")
    lengths, estimated = [], 0
    for name, record in records.items():
        texts = texts_of(record)
        num_text_tokens = sum(len(tokenizer.encode(text)) for text in texts)
        estimated += sum(map(estimate_num_tokens, texts))
        sizes = [image["size"] for image in images_of(truth, name, record)]
        vision = sum(max(4, round(w / 28) * round(h / 28)) + 2 for w, h in sizes)
        # <|im_start|>, role, newline, <|im_end|>, newline per message; default system prompt.
        overhead = 5 * len(texts) + 11
        if truth["set_aside"].get(name) == "overlong":
            assert num_text_tokens > SEQ_LENGTH
        else:
            assert num_text_tokens + vision + overhead <= SEQ_LENGTH, name
            lengths.append(num_text_tokens)
    assert estimated == pytest.approx(sum(lengths) + 5 * 3000, rel=0.2)
    found = np.quantile(lengths, [0, 0.5, 0.95, 1]) < [15, 150, 400, 1000]
    assert found.tolist() == [True, True, False, False]
    assert len(set(lengths)) > 150
    said = ["".join(texts_of(record)) for record in records.values()]
    chinese, spanish = (
        np.mean([bool(re.search(letters, one)) for one in said])
        for letters in ("[\u4e00-\u9fff]", "[áéíóúñ¿]")
    )
    assert 0.2 < chinese < 0.4
    assert 0.05 < spanish < 0.2
    sides = np.array([image["size"] for image in truth["images"].values()])
    assert sides.min() < 60 < 600 < sides.max()
    assert (sides.max(axis=1) / sides.min(axis=1)).max() > 7


def test_a_finished_dataset_is_reused_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    first = generate_demo_dataset(path, num_samples=50, progress=False)
    written = (path / "truth.json").stat().st_mtime_ns
    assert generate_demo_dataset(path, num_samples=50, progress=False) == first
    assert (path / "truth.json").stat().st_mtime_ns == written
    with pytest.raises(FileExistsError, match=r"is not the demo dataset .*'seed': 1.*; remove"):
        generate_demo_dataset(path, seed=1, num_samples=50, progress=False)
    (tmp_path / "foreign").mkdir()
    with pytest.raises(FileExistsError, match="is not the demo dataset"):
        generate_demo_dataset(tmp_path / "foreign", num_samples=50, progress=False)
    with pytest.raises(ValueError, match="num_samples 49 < 50"):
        generate_demo_dataset(tmp_path / "small", num_samples=49, progress=False)


def test_an_interrupted_run_leaves_no_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("disk full")

    monkeypatch.setattr(generate, "_encode", fail)
    with pytest.raises(OSError, match="disk full"):
        generate_demo_dataset(tmp_path / "data", num_samples=50, progress=False)
    assert not (tmp_path / "data").exists()
    monkeypatch.undo()
    generate_demo_dataset(tmp_path / "data", num_samples=50, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
