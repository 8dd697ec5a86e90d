"""Stage 5: packs of dialogues, by a knapsack with a budget of tokens and one of images."""

from pathlib import Path
from typing import Any

from common import (
    BATCH_SIZE,
    MAX_IMAGES_PER_PACK,
    MAX_IMAGES_PER_SAMPLE,
    SEQ_LENGTH,
    Batch,
    DemoDialogues,
    draw_batch,
    make_batch,
    save_picture,
    show,
    stage,
)
from torch.utils.data import DataLoader

from offline_packing.online import ConstantLengthDataset
from task_encoders.sample_encoder import EncodedSample


@stage
def main(data: Path, pictures: Path) -> None:
    """Print and draw the first batch, and count the padding of all."""
    dialogues = DemoDialogues(data)

    def collate(packs: list[list[EncodedSample]]) -> Batch:
        return make_batch(packs, SEQ_LENGTH, dialogues.pad_token_id)

    shown = []
    for strategy in ("knapsack", "auto"):
        packed = ConstantLengthDataset(
            dialogues,
            seq_length=SEQ_LENGTH,
            max_images_per_sample=MAX_IMAGES_PER_SAMPLE,
            max_images_per_pack=MAX_IMAGES_PER_PACK,
            strategy=strategy,
        )
        print(f"\n=== Strategy: {strategy.upper()} ===\n")
        batches = list(DataLoader(packed, batch_size=BATCH_SIZE, collate_fn=collate))
        show(batches)
        print(f"set aside: {dict(packed.set_aside)}")
        shown.append((strategy, batches[0]))

    def draw(*axes: Any) -> None:
        for one, (strategy, batch) in zip(axes, shown, strict=True):
            draw_batch(one, batch, strategy)

    save_picture(draw, pictures / "knapsack_multimodal.png", columns=2)


if __name__ == "__main__":
    main()
