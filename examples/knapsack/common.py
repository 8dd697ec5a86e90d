"""Parts that the stages share: the demo's dialogues, their batches, and the picture of one."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import matplotlib
import torch
from torch.utils.data import DataLoader, Dataset

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.sources import open_source
from task_encoders.concatenate import concatenate
from task_encoders.families import build_sample_encoder
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SampleError, SourceSample

SEQ_LENGTH = 512
BATCH_SIZE = 8
MAX_IMAGES_PER_SAMPLE = 4
MAX_IMAGES_PER_PACK = 18
CONTENT, CONTENT_BESIDE, PADDING = "#2f6db5", "#8db8e2", "#d0d0d0"

Batch = dict[str, Any]
Collate = Callable[[list[Any]], Batch]


class DemoDialogues(Dataset[EncodedSample]):
    """Dialogues of several turns about up to three pictures of at most 64 tokens each. Those that
    are bad on purpose raise SampleError."""

    def __init__(self, data: Path) -> None:
        if not data.exists():
            generate_demo_dataset(data)
        self._source = open_source({"format": "pairs", "path": str(data / "bmr"), "task": "bmr"})
        parts = self._source.scan(samples_per_part=4096).parts
        self._records = [record for part in parts for record in self._source.records(part)]
        self._encoder = build_sample_encoder("qwen2_vl", max_pixels=64 * 28 * 28)
        self.pad_token_id = self._encoder.pad_token_id

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> tuple[SourceSample, list[bytes]]:
        """A dialogue, and the files of its pictures. Raises SampleError."""
        record = self._records[index]
        sample = self._source.sample(record, record.key)
        return sample, [self._source.open_media(record, name)[1].read() for name in sample.images]

    def __getitem__(self, index: int) -> EncodedSample:
        return self._encoder.encode(*self.read(index))

    def usable(self) -> list[EncodedSample]:
        """All that can be encoded; says how many cannot, and why."""
        samples, reasons = [], Counter[str]()
        for index in range(len(self)):
            try:
                samples.append(self[index])
            except SampleError as error:
                reasons[error.reason] += 1
        print(f"{len(samples)} dialogues, set aside: {dict(reasons)}")
        return samples


def make_batch(packs: Sequence[Sequence[EncodedSample]], length: int, pad_token_id: int) -> Batch:
    """Rows (B, length), one for each pack, padded at their end. ``cu_seq_lens`` are the boundaries
    in each row, and ``images`` the pixels of each row's images."""
    rows = [concatenate(pack, pad_token_id=pad_token_id, pad_to_length=length) for pack in packs]
    return {
        "input_ids": torch.stack([row.tokens for row in rows]),
        "attention_masks": torch.stack([(~row.attn_mask).long() for row in rows]),
        "images": [row.pixel_values for row in rows],
        "labels": torch.stack([row.labels for row in rows]),
        "cu_seq_lens": [row.cu_lengths for row in rows],
        "num_images": [len(row.image_grid_thw) for row in rows],
    }


def batches_of(samples: Sequence[EncodedSample], collate: Collate) -> list[Batch]:
    """All batches of a plain loader, each of BATCH_SIZE samples before `collate`."""
    shuffled = torch.Generator().manual_seed(0)
    loader: DataLoader[Any] = DataLoader(
        list(samples), batch_size=BATCH_SIZE, shuffle=True, generator=shuffled, collate_fn=collate
    )
    return list(loader)


def padding_share(batches: Iterable[Batch]) -> float:
    """Share of the batches' positions that hold no token."""
    tokens, positions = 0, 0
    for batch in batches:
        tokens += int(batch["attention_masks"].sum())
        positions += batch["attention_masks"].numel()
    return 1 - tokens / positions


def show(batches: Sequence[Batch]) -> None:
    """Print the first batch, and the padding of it and of all."""
    for name in ("input_ids", "attention_masks", "images", "labels"):
        value = batches[0][name]
        print(name, len(value) if isinstance(value, list) else value.shape)
    first, every = padding_share(batches[:1]), padding_share(batches)
    rows = sum(len(batch["input_ids"]) for batch in batches)
    print(f"padding: {first:.1%} of this batch, {every:.1%} of all {rows} rows")


def draw_batch(axes: Axes, batch: Batch, title: str) -> None:
    """A bar for each row: its samples in turn, then the padding."""
    masks = batch["attention_masks"]
    longest = masks.shape[1]
    for row, bounds in enumerate(batch["cu_seq_lens"]):
        used = int(masks[row].sum())
        axes.barh(row, longest - used, left=used, color=PADDING)
        starts = [start for start in bounds.tolist() if start < used]
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], used], strict=True)):
            axes.barh(row, end - start, left=start, color=(CONTENT, CONTENT_BESIDE)[number % 2])
        count = batch["num_images"][row]
        axes.text(longest * 1.01, row, f"{count} image{'s' * (count != 1)}", va="center", size=8)
    axes.set_yticks(range(len(masks)), [f"row {row + 1}" for row in range(len(masks))])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.17)
    axes.set_xlabel("tokens (blue) and padding (grey)")
    axes.set_title(f"{title}: {padding_share([batch]):.0%} padding", size=11)


def save_picture(
    draw: Callable[..., None], file: Path, columns: int = 1, height: float = 3
) -> None:
    """Let `draw` fill `columns` axes side by side, and write the picture."""
    figure, axes = plt.subplots(1, columns, figsize=(6 + 4 * (columns - 1), height), squeeze=False)
    draw(*axes[0])
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    plt.close(figure)
    print(f"Saved {file}")


def stage(function: Callable[[Path, Path], None]) -> click.Command:
    """The program of a stage: function(folder of the demo's data, folder of the pictures)."""
    logging.getLogger("offline_packing").setLevel(logging.ERROR)  # what is set aside is counted
    data = click.option("--data", type=Path, default=Path("demo_output/data"), show_default=True)
    pictures = click.option("--pictures", type=Path, default=Path("out/knapsack"))
    return click.command(help=function.__doc__)(data(pictures(function)))
