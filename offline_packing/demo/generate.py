"""Write the demo dataset: pictures, captions, questions and dialogues with known true answers.

PATH/captioning/cap_000000.jpg + .json      {"captions": [{"content": …}]} or {"caption": …}
PATH/vqa/000000000003.png + .json           {"messages": […], "images": ["000000000003.png"]}
PATH/vqa/000000000000_1.jpg + .json         numbered copy: one more question about that picture
PATH/bmr/dialogue_000001.json + pictures    several turns, system prompts, up to three pictures
PATH/bmr/output_00000000.json               text only, "images": []
PATH/bmr_jsonl/dialogues.jsonl + images/    one {"id", "messages", "images"} per line
PATH/truth.json                             what was drawn, and which samples are bad on purpose
"""

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any, Final

import orjson
from PIL import Image
from PIL.Image import Transpose
from tqdm import tqdm

from offline_packing.demo.pictures import Picture
from offline_packing.demo.samples import make_sample

#: `seed`, `num_samples`, `version`; `images`: relative path -> `size` (width, height) upright in
#: pixels, `orientation` (1: no EXIF tag), `mode`, and what was drawn, as in `Picture.drawn`;
#: `set_aside`: "folder/key" of each sample that is bad on purpose -> the reason it must get.
Truth = dict[str, Any]

MIN_NUM_SAMPLES: Final = 50
#: Raise it when the same seed gives other files than before.
_VERSION: Final = 2
#: Folder -> its share of the samples, and the faults planted in it whatever its size.
_FOLDERS: Final[dict[str, tuple[float, tuple[str, ...]]]] = {
    "captioning": (0.35, ("truncated_image", "overlong")),
    "vqa": (0.30, ("missing_image", "overlong", "empty_answer")),
    "bmr": (0.27, ("bad_json", "overlong", "image_count_mismatch", "overlong")),
    "bmr_jsonl": (0.08, ("overlong",)),
}
#: EXIF orientation -> the transposition that turns the upright picture into the stored one.
_STORED_BY: Final = {6: Transpose.ROTATE_90, 3: Transpose.ROTATE_180, 8: Transpose.ROTATE_270}
#: Every _TURN_EVERY-th JPEG is stored turned, every _MODE_EVERY-th picture in another mode.
_TURN_EVERY, _MODE_EVERY = 20, 8


def generate_demo_dataset(
    path: str | os.PathLike[str], *, seed: int = 0, num_samples: int = 2000, progress: bool = True
) -> Truth:
    """Write the dataset to `path` (which appears only when complete) and return the truth about it.

    The same seed and number give the same bytes with the same Pillow. If `path` already holds that
    dataset, nothing is written. Raises FileExistsError if `path` holds anything else, ValueError if
    `num_samples` is below MIN_NUM_SAMPLES.
    """
    if num_samples < MIN_NUM_SAMPLES:
        raise ValueError(f"demo: num_samples {num_samples} < {MIN_NUM_SAMPLES}; ask for more")
    path, about = Path(path), {"seed": seed, "num_samples": num_samples, "version": _VERSION}
    if path.exists():
        return _existing(path, about)
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left over from a killed run
    truth: Truth = {**about, "images": {}, "set_aside": {}}
    counts = {folder: int(share * num_samples) for folder, (share, _) in _FOLDERS.items()}
    counts["captioning"] += num_samples - sum(counts.values())
    with tqdm(total=num_samples, desc="demo data", unit="sample", disable=not progress) as bar:
        for folder, count in counts.items():
            _write_folder(partial / folder, count, truth, bar)
    (partial / "truth.json").write_bytes(orjson.dumps(truth, option=orjson.OPT_INDENT_2))
    partial.rename(path)
    return truth


def _existing(path: Path, about: dict[str, int]) -> Truth:
    """The truth about the dataset at `path` if it is the one asked for."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        truth: Truth = orjson.loads((path / "truth.json").read_bytes())
        if all(truth[name] == value for name, value in about.items()):
            return truth
    raise FileExistsError(
        f"'{path}' exists and is not the demo dataset {about}; remove that folder or choose another"
    )


def _write_folder(folder: Path, count: int, truth: Truth, bar: tqdm) -> None:
    """Make and write the samples of a folder, its faults spread evenly among them."""
    names, lines = _FOLDERS[folder.name][1], folder / "dialogues.jsonl"
    faults = {(i + 1) * count // (len(names) + 1): name for i, name in enumerate(names)}
    (folder / "images" if folder.name == "bmr_jsonl" else folder).mkdir(parents=True)
    for index in range(count):
        fault = faults.get(index)
        key, record, pictures = make_sample(folder.name, truth["seed"], index, fault)
        if fault:
            truth["set_aside"][f"{folder.name}/{key}"] = fault
        for name, picture in pictures.items():
            if fault != "missing_image":
                content = _encode(picture, f"{folder.name}/{name}", truth["images"])
                cut = len(content) * 8 // 10 if fault == "truncated_image" else None
                (folder / name).write_bytes(content[:cut])
        if fault == "image_count_mismatch":
            record["messages"][-2]["content"] = "<image>\n" * (len(pictures) + 1) + "What is this?"
        elif fault == "empty_answer":
            record["messages"][-1]["content"] = ""
        line = orjson.dumps(record) + b"\n"
        line = line[: len(line) // 2] if fault == "bad_json" else line
        with (lines if folder.name == "bmr_jsonl" else folder / f"{key}.json").open("ab") as file:
            file.write(line)
        bar.update()


def _encode(picture: Picture, name: str, images: dict[str, Any]) -> bytes:
    """The file of a picture by the suffix of its name; the truth about it is put into `images`."""
    jpeg, count, orientation = name.endswith(".jpg"), len(images), 1
    modes = ["L"] if "lines" in picture.drawn else ["CMYK"] if jpeg else ["P", "RGBA"]
    mode = modes[count // _MODE_EVERY % len(modes)] if count % _MODE_EVERY == 5 else "RGB"
    image, exif = picture.image.convert(mode), Image.Exif()
    turn, place = divmod(sum(other.endswith(".jpg") for other in images), _TURN_EVERY)
    if jpeg and place == _TURN_EVERY // 2:
        orientation = list(_STORED_BY)[turn % len(_STORED_BY)]
        image, exif[0x0112] = image.transpose(_STORED_BY[orientation]), orientation
    about = {"size": list(picture.image.size), "orientation": orientation, "mode": mode}
    images[name] = about | picture.drawn
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if jpeg else "PNG", quality=90, exif=exif)
    return buffer.getvalue()
