"""Packs in the layouts of trainers on Energon: written by .venv's Python, whose Energon is newer
than theirs, and read through the task encoder in a checkout of the trainer."""

import io
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import yaml
from megatron.energon import WorkerConfig, get_loader, get_train_dataset
from PIL import ExifTags, Image

from offline_packing.storage.files import read_json
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.loading.packed_folder import PackedFolder, RawPack
from task_encoders.model_inputs import media_kwargs
from task_encoders.packs.pack import Pack, parse_json, sub_samples_of_pack
from task_encoders.samples import IGNORE_INDEX

REPOSITORY = Path(__file__).parents[2]


def pack_by_command(
    root: Path, source: Any, model: dict[str, Any], *, layout: str, seq_length: int
) -> Path:
    """Pack a source in a layout, and return the output."""
    config = {
        "source": source,
        "model": model,
        "pack": {"seq_length": seq_length, "max_set_aside": 0.5},
        "output": {"path": str(root / "packed"), "layout": layout},
        "engine": {"workers": 0},
    }
    root.mkdir(exist_ok=True)
    (root / "pack.yaml").write_text(yaml.safe_dump(config))
    command = [".venv/bin/python", "-m", "offline_packing", "run", "--deep"]
    subprocess.run(
        [*command, str(root / "pack.yaml")], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
    )
    return root / "packed"


#: Arguments, tokenizer and chat template, which data code asks for.
_GIVEN: dict[str, Any] = {}


class OwnCode(NamedTuple):
    """Data code of a trainer. Its package as a whole imports Megatron's trainer, of which the data
    code takes only the arguments, the tokenizer and the chat template.

    Args:
        templates: module of its chat templates.
        encoder: module and class of its task encoder.
        base: module of the function that its loader gives errors to.
    """

    package: str
    templates: str
    encoder: tuple[str, str]
    base: str

    def install(self, checkout: Path) -> None:
        """Make its data code importable from a checkout."""
        for part in ("", ".data", ".utils", ".tokenizer"):
            module = ModuleType(f"{self.package}{part}")
            module.__path__ = [str(checkout / module.__name__.replace(".", "/"))]
            sys.modules[module.__name__] = module
        utils: Any = sys.modules[f"{self.package}.utils"]
        utils.get_args = lambda: _GIVEN["args"]
        utils.get_tokenizer = lambda: _GIVEN["tokenizer"]
        utils.get_chat_template = lambda: _GIVEN["template"]

    def _data(self, module: str) -> Any:
        return import_module(f"{self.package}.data.{module}")

    def task_encoder(self, checkpoint: Path, template: str | None, **arguments: Any) -> Any:
        """Build its task encoder for a checkpoint's processor. `template`: the name of a chat
        template; None: its pre-training phase, which has none."""
        own = import_module(f"{self.package}.tokenizer.tokenization_hf").AutoTokenizerFromHF
        templates = self._data(self.templates).ChatTemplate
        _GIVEN["args"] = Namespace(
            training_phase="pretrain" if template is None else "sft",
            hf_tokenizer_path=str(checkpoint),
            enable_discard_sample=False,
            packing_pretrain_data=False,
            packing_sft_data=False,
            **arguments,
        )
        _GIVEN["tokenizer"] = own(str(checkpoint), True, "right", 1 << 30, False)
        _GIVEN["template"] = template and templates.from_name(template)
        module, name = self.encoder
        return getattr(self._data(module), name)(_GIVEN["args"])

    def batches(self, packed: Path, encoder: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Key and batch of each pack, in one epoch through Energon's loader with its arguments. A
        pack that it cannot use is left out, and the next epoch begins early."""
        dataset = get_train_dataset(
            str(packed),
            batch_size=1,
            task_encoder=encoder,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            packing_buffer_size=None,
            handler=self._data(self.base).print_error_handler,
            image_decode="pil",
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
        )
        keys = {raw.key for raw in PackedFolder(packed)}
        for batch in islice(get_loader(dataset), len(keys)):
            key = batch["__key__"][0].partition("/")[2].partition(".")[0]
            assert key in keys, f"{key} comes again, though {sorted(keys)} did not come"
            keys.remove(key)
            yield key, batch

    def compare(
        self,
        packed: Path,
        encoder: Any,
        model: dict[str, Any],
        *,
        newline: bool = False,
        tolerance: float = 0.0,
    ) -> Counter[str]:
        """Compare its batch of every pack, sample by sample, with what we make of it: tokens,
        labels, grids, and the values of images, unless EXIF turns one; count what was compared.

        Args:
            newline: its template writes one after the last answer, and trains those after all.
            tolerance: of the values of images.
        """
        packs = {raw.key: raw for raw in PackedFolder(packed)}
        task = read_json(packed / "manifest.json")["task"]
        ours = build_sample_encoder(model_options(**model))
        (end,), (line,) = (encoder.tokenizer.tokenize(text) for text in ("<|im_end|>", "\n"))
        counts: Counter[str] = Counter()
        for key, batch in self.batches(packed, encoder):
            samples, bounds = sub_samples(packs.pop(key), task), batch["cu_lengths"][0].tolist()
            names = ("imgs", "patch_positions") if "patch_positions" in batch else ("imgs",)
            images = pictures(batch["image_grid_thw"], *(batch[name] for name in names))
            clips = pictures(batch["video_grid_thw"], batch["pixel_values_videos"])
            for (_, sample, *media), (first, after) in zip(samples, pairwise(bounds), strict=True):
                one = ours.encode(sample, *map(list, media[:2]))
                tokens = torch.tensor([*one.tokens, *[line] * newline])
                labels = torch.tensor([*one.labels, *[IGNORE_INDEX] * newline])
                if newline:
                    labels[1:][(labels[:-1] == end) & (tokens[1:] == line)] = line
                assert tokens.tolist() == batch["tokens"][0, first:after].tolist(), sample
                assert labels.tolist() == batch["labels"][0, first:after].tolist(), sample
                counts["turned"] += compare_images(media[0], one, images, tolerance)
                assert [next(clips)[0] for _ in sample.videos] == one.video_grid_thw.tolist()
                counts["tools"] += bool(sample.tools)
                counts["systems"] += sample.system is not None
                counts["images"] += len(sample.images)
                counts["of several images"] += len(sample.images) > 1
                counts["videos"] += len(sample.videos)
            assert batch["tokens"].shape == batch["labels"].shape == (1, bounds[-1])
            assert not [*images, *clips]
            counts["packs"] += 1
            counts["samples"] += len(samples)
        assert not packs
        return counts


def said_of(counts: Counter[str]) -> str:
    """Return the counts of a comparison as a sentence's part."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count)


def sub_samples(raw: RawPack, task: str) -> list[Any]:
    """Return the samples of a pack with their media; none is damaged."""
    return sub_samples_of_pack(Pack(raw.key, parse_json(raw.record, raw.key), raw.media), task)


def compare_images(
    files: Sequence[bytes], ours: Any, theirs: Iterator[tuple[Any, ...]], tolerance: float
) -> int:
    """Compare the next images of a row with those of a sample, and return how many EXIF turns,
    which these trainers do not do."""
    grids, turned = torch.from_numpy(ours.image_grid_thw), 0
    found = media_kwargs(torch.from_numpy(ours.pixel_values), grids, layout=ours.image_layout)
    values = [found[name] for name in ("pixel_values", "patch_positions") if name in found]
    for data, (grid, *own) in zip(files, pictures(grids, *values), strict=True):
        its_grid, *its = next(theirs)
        assert sorted(its_grid) == sorted(grid)
        if Image.open(io.BytesIO(data)).getexif().get(ExifTags.Base.Orientation, 1) != 1:
            turned += 1
            continue
        assert its_grid == grid
        for one, other in zip(own, its, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=tolerance)
    return turned


def pictures(grids: torch.Tensor | None, *values: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Grid of each image or video, and its part of each tensor with a row per patch."""
    if grids is not None and len(grids):
        parts = (one.split(grids.prod(-1).tolist()) for one in values)
        yield from zip(grids.tolist(), *parts, strict=True)
