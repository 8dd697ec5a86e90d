"""Write the demo dataset: pictures, captions, questions and dialogues whose truth is known.

PATH/captioning/cap_000000.jpg + .json      {"captions": [{"content": …}]} or {"caption": …}
PATH/vqa/000000000003.png + .json           {"messages": […], "images": ["000000000003.png"]}
PATH/vqa/000000000000_1.jpg + .json         numbered copy: one more question about that picture
PATH/bmr/dialogue_000001.json + pictures    several turns, system prompts, up to three pictures
PATH/bmr/output_00000000.json               text only, "images": []
PATH/bmr_jsonl/dialogues.jsonl + images/    one {"id", "messages", "images"} per line
PATH/truth.json                             what was drawn, and which samples are bad on purpose
"""

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
from PIL import Image
from tqdm import tqdm

from offline_packing.demo.depiction import Depiction
from offline_packing.demo.samples import (
    DemoSample,
    make_bmr_sample,
    make_captioning_sample,
    make_jsonl_sample,
    make_vqa_sample,
)
from offline_packing.demo.truth import (
    GENERATOR_VERSION,
    TRUTH_NAME,
    DemoTruth,
    ImageTruth,
    PlantedFault,
)

MIN_NUM_SAMPLES = 50
JSONL_NAME = "dialogues.jsonl"

#: Folder -> (share of the samples, maker of sample (seed, index, fault)).
_FOLDERS: dict[str, tuple[float, Callable[[int, int, str | None], DemoSample]]] = {
    "captioning": (0.35, make_captioning_sample),
    "vqa": (0.30, make_vqa_sample),
    "bmr": (0.27, make_bmr_sample),
    "bmr_jsonl": (0.08, make_jsonl_sample),
}
#: Planted in every dataset whatever its size, so that even a small one shows what happens to them.
_FAULTS: dict[str, tuple[str, ...]] = {
    "captioning": ("truncated_image", "overlong"),
    "vqa": ("missing_image", "overlong", "empty_answer"),
    "bmr": ("bad_json", "overlong", "image_count_mismatch", "overlong"),
    "bmr_jsonl": ("overlong",),
}
#: Every _ROTATE_EVERY-th JPEG is stored rotated, with one of the orientations in turn.
_ROTATE_EVERY = 20
_ORIENTATION_TAG = 0x0112
#: Orientation -> the transposition that turns the upright picture into the stored one.
_STORED_BY: dict[int, Image.Transpose] = {
    6: Image.Transpose.ROTATE_90,
    3: Image.Transpose.ROTATE_180,
    8: Image.Transpose.ROTATE_270,
}


def generate_demo_dataset(
    path: str | os.PathLike[str],
    *,
    seed: int = 0,
    num_samples: int = 2000,
    progress: bool = True,
) -> DemoTruth:
    """Write the dataset to `path` (which appears only when complete) and return what is true of it.

    The same seed and number give the same bytes with the same Pillow. If `path` already holds that
    dataset, nothing is written. Raises FileExistsError if `path` holds anything else, ValueError if
    `num_samples` is below MIN_NUM_SAMPLES.
    """
    path = Path(path)
    if num_samples < MIN_NUM_SAMPLES:
        raise ValueError(
            f"demo dataset: num_samples {num_samples} < {MIN_NUM_SAMPLES}; "
            f"ask for {MIN_NUM_SAMPLES} or more"
        )
    if path.exists():
        return _existing(path, seed, num_samples)
    partial = path.with_name(path.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left over from a run that was killed
    partial.mkdir(parents=True)
    writer = _DatasetWriter(partial)
    with tqdm(total=num_samples, desc="demo data", unit="sample", disable=not progress) as bar:
        for folder, count in _split(num_samples).items():
            writer.write_folder(folder, count, seed, bar)
    truth = writer.finish(DemoTruth(path, seed, num_samples))
    partial.rename(path)
    return truth


def _existing(path: Path, seed: int, num_samples: int) -> DemoTruth:
    """The truth of the dataset at `path` if it is the one asked for."""
    remedy = "remove that folder or choose another path"
    try:
        truth = DemoTruth.read(path)
    except (OSError, ValueError) as error:
        raise FileExistsError(f"'{path}' exists and is no demo dataset; {remedy}") from error
    found = (truth.seed, truth.num_samples, truth.version)
    wanted = (seed, num_samples, GENERATOR_VERSION)
    if found != wanted:
        raise FileExistsError(
            f"'{path}' holds the demo dataset with (seed, num_samples, version) {found}, "
            f"wanted {wanted}; {remedy}"
        )
    return truth


def _split(num_samples: int) -> dict[str, int]:
    """Samples per folder; rounding goes to the first one."""
    counts = {folder: int(share * num_samples) for folder, (share, _) in _FOLDERS.items()}
    counts["captioning"] += num_samples - sum(counts.values())
    return counts


class _DatasetWriter:
    """Puts samples on disk and keeps the truth about them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._num_jpegs = 0
        self._num_bytes = 0
        self._num_text_only = 0
        self._counts: dict[str, int] = {}
        self._images: dict[str, ImageTruth] = {}
        self._faults: list[PlantedFault] = []

    def write_folder(self, folder: str, count: int, seed: int, bar: tqdm) -> None:
        """Make and write `count` samples, the folder's faults spread evenly among them."""
        make = _FOLDERS[folder][1]
        names = _FAULTS[folder]
        faults = {(i + 1) * count // (len(names) + 1): name for i, name in enumerate(names)}
        lines: list[bytes] = []
        (self._root / folder).mkdir()
        for index in range(count):
            fault = faults.get(index)
            sample = make(seed, index, fault)
            if fault is not None:
                self._faults.append(PlantedFault(folder, sample.key, fault))
            record = self._write_sample(folder, sample, fault)
            if folder == "bmr_jsonl":
                lines.append(record + b"\n")
            else:
                self._write_file(f"{folder}/{sample.key}.json", record)
            bar.update()
        if lines:
            self._write_file(f"{folder}/{JSONL_NAME}", b"".join(lines))
        self._counts[folder] = count

    def finish(self, truth: DemoTruth) -> DemoTruth:
        """Write the truth file, the last of all."""
        truth = replace(
            truth,
            num_samples_by_folder=self._counts,
            num_text_only=self._num_text_only,
            num_bytes=self._num_bytes,
            images=self._images,
            set_aside=self._faults,
        )
        with open(self._root / TRUTH_NAME, "wb") as file:
            file.write(truth.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        return truth

    def _write_sample(self, folder: str, sample: DemoSample, fault: str | None) -> bytes:
        """Write the pictures; returns the JSON. A fault other than `overlong` is put in here."""
        self._num_text_only += not sample.pictures
        for name, picture in sample.pictures.items():
            if fault != "missing_image":
                self._write_picture(f"{folder}/{name}", picture, fault == "truncated_image")
        messages = sample.record.get("messages", [])
        if fault == "image_count_mismatch":
            user = next(message for message in messages if message["role"] == "user")
            user["content"] = "<image>\n" * (len(sample.pictures) + 1) + "What is this?"
        elif fault == "empty_answer":
            messages[-1]["content"] = ""
        record = orjson.dumps(sample.record)
        return record[: len(record) // 2] if fault == "bad_json" else record

    def _write_picture(self, name: str, picture: Depiction, truncate: bool) -> None:
        orientation = 1
        if name.endswith(".jpg"):
            # The 10th, 30th, 50th … JPEG: the smallest dataset has rotated ones too.
            self._num_jpegs += 1
            turn, place = divmod(self._num_jpegs, _ROTATE_EVERY)
            if place == _ROTATE_EVERY // 2:
                orientation = list(_STORED_BY)[turn % len(_STORED_BY)]
        content = _encode(picture.image, name, orientation)
        self._write_file(name, content[: len(content) * 8 // 10] if truncate else content)
        self._images[name] = ImageTruth(picture.image.size, orientation, picture.objects)

    def _write_file(self, name: str, content: bytes) -> None:
        target = self._root / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
        self._num_bytes += len(content)


def _encode(image: Image.Image, name: str, orientation: int) -> bytes:
    """JPEG or PNG bytes, by the suffix of `name`; with an EXIF tag unless the orientation is 1."""
    buffer = io.BytesIO()
    if not name.endswith(".jpg"):
        image.save(buffer, "PNG")
    elif orientation == 1:
        image.save(buffer, "JPEG", quality=90)
    else:
        exif = Image.Exif()
        exif[_ORIENTATION_TAG] = orientation
        image.transpose(_STORED_BY[orientation]).save(buffer, "JPEG", quality=90, exif=exif)
    return buffer.getvalue()
