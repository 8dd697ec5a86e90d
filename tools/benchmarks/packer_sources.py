"""Other projects' packers, run from their sources as their own programs run them.

Each takes the folder of its project's source and the samples, and returns rows as lists of sample
numbers. What a packer needs beside lengths is made up: a sample's tokens are its number, repeated.
Modules of theirs that only name types or log are replaced by empty ones.
"""

import logging
import pickle
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import set_start_method
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from planner_peers import greedy_knapsack, in_batches, load_file

from offline_packing import plan_packs
from task_encoders.families.builtin_processor import builtin_processor

SEQ_LENGTH = 8192
#: Limits of images in pixels in AutoModel's recipe for neat packing.
LIMITS = {"min_pixels": 256 * 28 * 28, "max_pixels": 1280 * 28 * 28}
BUFFER = 16

Rows = Sequence[Sequence[int]]


class Samples(NamedTuple):
    """The data set: a value per sample, (n,) each but `sizes`."""

    tokens: np.ndarray  #: as trained, template and images included
    text_tokens: np.ndarray  #: those that are not an image's
    characters: np.ndarray  #: of its messages
    images: np.ndarray  #: how many
    sizes: np.ndarray  #: (n, 3, 2) height and width of each image

    def that_fit(self) -> list[int]:
        """Numbers of the samples that are not longer than a sequence."""
        return np.flatnonzero(self.tokens <= SEQ_LENGTH).tolist()


def stand_in(name: str, **content: Any) -> None:
    """An empty module of that name, and of missing packages around it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(content)


def _token_file(path: Path, samples: Samples) -> None:
    lines = (f"s{i}:{samples.tokens[i]}\n" for i in samples.that_fit())
    path.write_text("".join(lines))


def _boxes(path: Path) -> Rows:
    """Written by a packer in this process."""
    with open(path, "rb") as file:
        return [[int(str(item["name"])[1:]) for item in box] for box in pickle.load(file)]


def llava_onevision_1_5(source: Path, samples: Samples, scratch: Path) -> Rows:
    """2_do_hashbacket.py, with its own sequence of phases."""
    folder = scratch / "part_00" / "save_files"
    folder.mkdir(parents=True)
    _token_file(folder / "tokens.txt", samples)
    (scratch / "config.yaml").write_text(
        f"hosts: none\ndata: {{directory: {scratch}, output_base: base.txt, output_token: "
        f"tokens.txt}}\nsample: {{max_len: {SEQ_LENGTH}}}\n"
    )
    scripts = source / "examples/llava_ov_1_5/sample_packing"
    sys.path.insert(0, str(scripts))
    logging.disable()
    sys.modules.pop("tool", None)  # reads the configuration
    runpy.run_path(str(scripts / "2_do_hashbacket.py"), run_name="__main__")
    return _boxes(folder / "bins_boxs.pkl")


def llava_onevision_2(source: Path, samples: Samples, scratch: Path) -> Rows:
    """s3_bin_packing.py, as auto_pipe.sh calls it: best-fit, at most 200 samples."""
    _token_file(scratch / "tokens.txt", samples)
    module = load_file(source / "offline_packing/s3_bin_packing.py")
    paths = ["--input", str(scratch / "tokens.txt"), "--output", str(scratch / "bins.pkl")]
    sys.argv = ["s3_bin_packing.py", *paths, "--capacity", str(SEQ_LENGTH), "--max-samples", "200"]
    module.main()
    return _boxes(scratch / "bins.pkl")


def _automodel(source: Path, samples: Samples, *, known: bool, **options: Any) -> Rows:
    """Plan, and materialize every pack: where samples that do not fit are left out."""
    sys.path.insert(0, str(source))
    from nemo_automodel.components.datasets.vlm.neat_packing_vlm import NeatPackConfig

    def encoded(i: int) -> dict[str, torch.Tensor]:
        ids = torch.full((int(samples.tokens[i]),), i)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    dataset: Any = _Sized(len(samples.tokens), encoded)
    raw: Any = _Sized(len(samples.tokens), lambda i: _conversation(samples, i, known=known))
    packed = NeatPackConfig(SEQ_LENGTH, drop_long_samples=True, **options).build(
        dataset=dataset, padding_idx=-1, ds_raw=raw, processor=builtin_processor(**LIMITS)
    )
    return [packed[i]["input_ids"].unique().tolist() for i in range(len(packed))]


def _conversation(samples: Samples, i: int, *, known: bool) -> dict[str, Any]:
    """A sample as AutoModel's datasets have it; `known`: after its precompute_tokens.py."""
    count = int(samples.images[i])
    content = [{"type": "image"}] * count
    text = {"type": "text", "text": " " * int(samples.characters[i])}
    example: dict[str, Any] = {"conversation": [{"role": "user", "content": [*content, text]}]}
    if known:
        example["_text_tokens"] = int(samples.text_tokens[i])
        example["mm_inputs_meta"] = {"images_meta": samples.sizes[i, :count].tolist()}
    return example


class _Sized(torch.utils.data.Dataset[Any]):
    """A map-style dataset of a function."""

    def __init__(self, size: int, item: Callable[[int], Any]) -> None:
        self._size, self._item = size, item

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if index >= self._size:
            raise IndexError(index)
        return self._item(index)


def automodel(source: Path, samples: Samples, scratch: Path) -> Rows:
    """As in the recipes for Qwen: lengths from characters, 500 per image, packs planned to 90%."""
    return _automodel(source, samples, known=False, packing_ratio=0.9)


def automodel_known(source: Path, samples: Samples, scratch: Path) -> Rows:
    """Lengths from precompute_tokens.py and image sizes, packs planned to 100%."""
    return _automodel(source, samples, known=True)


def megatron_bridge(source: Path, samples: Samples, scratch: Path) -> Rows:
    """The function that its Qwen-VL task encoder calls per buffer of Energon's; 16 as in its
    example. A longer sample raises there and is skipped."""
    stand_in("megatron.bridge.utils.safe_pickle", safe_load_npy=None)
    module = load_file(source / "src/megatron/bridge/data/packing/algorithms.py")
    fits = _shuffled(samples)
    return [
        row
        for start in range(0, len(fits), BUFFER)
        for row in module.first_fit_decreasing(
            fits[start : start + BUFFER],
            SEQ_LENGTH,
            item_lengths=samples.tokens[fits[start : start + BUFFER]].tolist(),
        )
    ]


def _shuffled(samples: Samples) -> list[int]:
    order: list[int] = np.random.default_rng(0).permutation(samples.that_fit()).tolist()
    return order


def ms_swift(source: Path, samples: Samples, scratch: Path) -> Rows:
    """PackingDataset, whose process packs 1,000 samples at a time."""
    set_start_method("fork", force=True)  # which it takes for granted
    stand_in("swift.template", MaxLengthError=ValueError)
    yes = {"get_logger": logging.getLogger, "is_dist": lambda: False, "is_master": lambda: True}
    stand_in("swift.utils", split_list=lambda values, count: [list(values)], **yes)
    module = load_file(source / "swift/dataset/packing.py")
    fits = _shuffled(samples)
    dataset = _Columns({"lengths": samples.tokens[fits].tolist()})
    packed = module.PackingDataset(SimpleNamespace(max_length=SEQ_LENGTH), dataset)
    return [[fits[i] for i in row] for row in packed.packed_idx]


class _Columns(dict[str, list[int]]):
    """A dataset by columns."""

    def __len__(self) -> int:
        return len(self["lengths"])


def nanovlm(source: Path, samples: Samples, scratch: Path) -> Rows:
    """ConstantLengthDataset with its training's settings, but this sequence length."""
    module = load_file(source / "data/advanced_datasets.py")
    order = _shuffled(samples)

    def item(place: int) -> dict[str, Any]:
        i = order[place]
        ids = torch.full((int(samples.tokens[i]),), i)
        images = [None] * int(samples.images[i])
        return {"input_ids": ids, "labels": ids, "attention_mask": ids, "images": images}

    dataset: Any = _Sized(len(order), item)
    dataset.dataset = order
    dataset.tokenizer = SimpleNamespace(pad_token_id=-1)
    dataset.mp_image_token_length = 64
    packed: Iterable[Mapping[str, Any]] = module.ConstantLengthDataset(
        dataset,
        max_sample_length=SEQ_LENGTH,
        seq_length=SEQ_LENGTH,
        num_of_sequences=8,
        queue_size=8,
        max_images_per_example=4,
        max_images_per_knapsack=18,
    )
    return [[i for i in row["input_ids"].unique().tolist() if i >= 0] for row in packed]


def llama_factory(source: Path, samples: Samples, scratch: Path) -> Rows:
    """Its greedy knapsack, on the 1,000 samples that `Dataset.map` hands its processor."""
    fits, package = _shuffled(samples), source / "src/llamafactory"
    pack = in_batches(partial(greedy_knapsack, package))
    rows = pack(samples.tokens[fits].tolist(), SEQ_LENGTH)
    return [[fits[i] for i in row] for row in rows]


def own(source: Path, samples: Samples, scratch: Path) -> Rows:
    """This project's default."""
    return [row.tolist() for row in plan_packs(samples.tokens, SEQ_LENGTH)]


class Packer(NamedTuple):
    """A packer, and the folder of its source."""

    run: Callable[[Path, Samples, Path], Rows]
    folder: str


PACKERS: dict[str, Packer] = {
    "this project, auto": Packer(own, "."),
    "LLaVA-OneVision-2, best fit": Packer(llava_onevision_2, "llava-onevision-2"),
    "LLaVA-OneVision-1.5, hash buckets": Packer(llava_onevision_1_5, "llava-onevision-1.5"),
    "ms-swift, windows of 1,000": Packer(ms_swift, "ms-swift"),
    "LLaMA-Factory, batches of 1,000": Packer(llama_factory, "llama-factory"),
    "AutoModel, lengths known": Packer(automodel_known, "automodel"),
    "AutoModel, as its recipes": Packer(automodel, "automodel"),
    "Megatron-Bridge, buffers of 16": Packer(megatron_bridge, "megatron-bridge"),
    "nanoVLM, buffers of 8 rows": Packer(nanovlm, "nanovlm"),
}
