"""Write the demo dataset: pictures of shapes; captions, questions and dialogues with true answers.

PATH/captioning/cap_000000.jpg + .json      {"captions": [{"content": …}]} or {"caption": …}
PATH/vqa/000000000003.png + .json           {"messages": […], "images": ["000000000003.png"]}
PATH/vqa/000000000000_1.jpg + .json         numbered copy: one more question about that picture
PATH/bmr/dialogue_000001.json + pictures    several turns, system prompts, up to three pictures
PATH/bmr/output_00000000.json               text only, "images": []
PATH/bmr_jsonl/dialogues.jsonl + images/    one {"id", "messages", "images", "rating"} per line
PATH/truth.json                             `set_aside`: the samples that are bad on purpose
"""

import math
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any, Final

import orjson
from PIL import Image, ImageDraw
from tqdm import tqdm

COLORS: Final = {"red": (214, 40, 40), "yellow": (240, 205, 20), "blue": (38, 84, 200)}
_SHAPES: Final = {"circle": 72, "triangle": 3, "square": 4, "hexagon": 6}  # corners
MIN_NUM_SAMPLES: Final = 50
_VERSION: Final = 3  # raised when the same seed gives other files
#: Folder -> its share of the samples, and the faults planted in it whatever its size.
_FOLDERS: Final[dict[str, tuple[float, tuple[str, ...]]]] = {
    "captioning": (0.35, ("truncated_image", "overlong")),
    "vqa": (0.30, ("missing_image", "overlong", "empty_answer")),
    "bmr": (0.27, ("bad_json", "overlong", "image_count_mismatch", "overlong")),
    "bmr_jsonl": (0.08, ("overlong",)),
}
Truth = dict[str, Any]  # `set_aside`: "folder/key" -> the reason it must get
Turn = tuple[str, str]  # question and answer


def draw_picture(rng: Random, overlong: bool) -> tuple[Image.Image, list[Turn]]:
    """Draw shapes in cells of a grid, and return turns about them with true answers. The first one
    describes some shapes; if it is to be `overlong`, more than a sequence holds."""
    width, height = (min(620, max(28, round(280 * math.exp(rng.gauss(0, 0.6))))) for _ in "xy")
    cell = math.exp(rng.uniform(math.log(38), math.log(150)))
    width, height, cell = (700, 520, 50) if overlong else (width, height, cell)
    columns, rows = max(1, int(width / cell)), max(1, int(height / cell))
    count = columns * rows if overlong else rng.randint(1, min(columns * rows, 40))
    image = Image.new("RGB", (2 * width, 2 * height), (252, 244, 220))  # halved: smooth edges
    lines, names = [f"Colored shapes on a pale background, {count} in all."], dict[Any, str]()
    for place in sorted(rng.sample(range(columns * rows), count)):
        radius = int(rng.uniform(0.26, 0.42) * min(width / columns, height / rows))
        x = int((place % columns + 0.5) * width / columns)
        y = int((place // columns + 0.5) * height / rows)
        color, shape = rng.choice(list(COLORS)), rng.choice(list(_SHAPES))
        names[x, y] = f"{color} {shape}"
        lines.append(f"One {color} {shape} of radius {radius} is centered at ({x}, {y}).")
        circle = (2 * x + 1, 2 * y + 1, 2 * radius)
        ImageDraw.Draw(image).regular_polygon(circle, _SHAPES[shape], fill=COLORS[color])
    told = len(lines) if overlong else round(len(lines) ** rng.uniform(0.3, 1.1))
    color, (x, y) = rng.choice(list(COLORS)), rng.choice(list(names))
    return image.reduce(2), [
        ("Describe the shapes.", " ".join(lines[:told])),
        ("How many shapes are there?", str(count)),
        (f"How many shapes are {color}?", str(sum(color in name for name in names.values()))),
        (f"What is drawn around the point ({x}, {y})?", names[x, y]),
        ("List the shapes from left to right.", ", ".join(names[at] for at in sorted(names))),
    ]


def generate_demo_dataset(
    path: str | os.PathLike[str], *, seed: int = 0, num_samples: int = 2000, progress: bool = True
) -> Truth:
    """Write the dataset to `path` (which appears only when complete) and return the truth about it.
    The same seed and number give the same bytes with the same Pillow. If `path` already holds that
    dataset, nothing is written. Raises FileExistsError if `path` holds anything else, ValueError if
    `num_samples` is below MIN_NUM_SAMPLES."""
    if num_samples < MIN_NUM_SAMPLES:
        raise ValueError(f"demo: num_samples {num_samples} < {MIN_NUM_SAMPLES}; ask for more")
    path, about = Path(path), {"seed": seed, "num_samples": num_samples, "version": _VERSION}
    if path.exists():
        file = path / "truth.json"
        found: Truth = orjson.loads(file.read_bytes()) if file.exists() else {}
        if about.items() <= found.items():
            return found
        raise FileExistsError(f"'{path}' is not the demo dataset {about}; remove it first")
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left over from a killed run
    (partial / "bmr_jsonl/images").mkdir(parents=True)
    truth: Truth = {**about, "set_aside": {}}
    counts = {folder: int(share * num_samples) for folder, (share, _) in _FOLDERS.items()}
    counts["captioning"] += num_samples - sum(counts.values())
    for (folder, count), (_, names) in zip(counts.items(), _FOLDERS.values(), strict=True):
        (partial / folder).mkdir(exist_ok=True)
        faults = {(i + 1) * count // (len(names) + 1): name for i, name in enumerate(names)}
        for index in tqdm(range(count), f"demo data, {folder}", disable=not progress):
            key = _write_sample(partial / folder, seed, index, faults.get(index, ""))
            truth["set_aside"] |= {f"{folder}/{key}": faults[index]} if index in faults else {}
    (partial / "truth.json").write_bytes(orjson.dumps(truth, option=orjson.OPT_INDENT_2))
    partial.rename(path)
    return truth


def _write_sample(folder: Path, seed: int, index: int, fault: str) -> str:
    """Write sample `index` of a folder, bad on purpose if there is a `fault`; return its key."""
    task, overlong, in_lines = folder.name[:3], fault == "overlong", folder.name == "bmr_jsonl"
    copy = index % 25 if task == "vqa" and index % 25 < 3 else 0  # three show one picture
    rng = Random(f"{seed}/{folder.name}/{index - copy}")
    count = rng.choice([0, 0, 0, 1, 1, 1, 1, 2, 3]) if task == "bmr" and not overlong else 1
    key = {
        "captioning": f"cap_{index:06d}",
        "vqa": f"{index - copy:012d}_{copy}".removesuffix("_0"),
        "bmr": f"dialogue_{index:06d}" if count else f"output_{index:08d}",
        "bmr_jsonl": f"chat-{index:06d}",
    }[folder.name]
    names, turns = list[str](), list[Turn]()
    for _ in range(0 if count else rng.choice((1, 1, 2, 6))):
        numbers = rng.sample(range(1000), round(2 * 25 ** rng.random()))
        asked, answer = (", ".join(map(str, some)) for some in (numbers, sorted(numbers)))
        turns.append((f"Sort from small to large: {asked}", answer))
    for number in range(count):
        kind = "jpg" if fault == "truncated_image" or rng.random() < 0.65 else "png"
        letter = ["_a", "_b", "_c"][number] * (count > 1)
        names.append(f"{'images/' * in_lines}{key}{letter}.{kind}")
        image, own = draw_picture(rng, overlong)
        which = f"In picture {number + 1}: " * (count > 1)
        turns += [(which + asked, answer) for asked, answer in own[count > 1 :]]
        exif, file = Image.Exif(), folder / names[-1]
        if kind == "jpg" and rng.random() < 0.05:
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6  # stored turned
        mode = rng.choice(["RGB"] * 7 + ["CMYK" if kind == "jpg" else "P"])
        if fault != "missing_image":
            image.convert(mode).save(file, quality=90, exif=exif)
        if fault == "truncated_image":
            os.truncate(file, file.stat().st_size * 8 // 10)
    few, most = task == "cap" or overlong, rng.choice((1, 1, 2, 8)) if task == "bmr" else 1
    turns = turns[:1] if few else rng.sample(turns, len(turns))[copy:][:most]
    texts = [text for turn in turns for text in turn]
    marks = count * (rng.random() > 0.06)  # none at all means the same
    texts[0] = "<image>\n" * (count + 1 if fault == "image_count_mismatch" else marks) + texts[0]
    texts[-1] = "" if fault == "empty_answer" else texts[-1]
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    if task == "bmr" and rng.random() < 1 / 6:
        messages.insert(0, {"role": "system", "content": "Answer to the point."})
    record: dict[str, Any] = {"messages": messages, "images": names}
    record |= {"id": key, "rating": 1 + index % 5} if task == "bmr" else {}
    if task == "cap":
        record = {"captions": [{"content": texts[1]}]} if index % 5 else {"caption": texts[1]}
    line = orjson.dumps(record) + b"\n"
    with (folder / ("dialogues.jsonl" if in_lines else f"{key}.json")).open("ab") as out:
        out.write(line[: len(line) // 2] if fault == "bad_json" else line)
    return key
