"""Stage 2: every sample a row, padded to the longest of its batch."""

from pathlib import Path

from common import (
    Batch,
    DemoDialogues,
    batches_of,
    draw_batch,
    make_batch,
    save_picture,
    show,
    stage,
)

from task_encoders.sample_encoder import EncodedSample


@stage
def main(data: Path, pictures: Path) -> None:
    """Print and draw the first batch, and count the padding of all."""
    dialogues = DemoDialogues(data)

    def collate(samples: list[EncodedSample]) -> Batch:
        longest = max(len(sample.tokens) for sample in samples)
        return make_batch([[sample] for sample in samples], longest, dialogues.pad_token_id)

    batches = batches_of(dialogues.usable(), collate)
    show(batches)
    save_picture(
        lambda axes: draw_batch(axes, batches[0], "Padded to the longest of the batch"),
        pictures / "knapsack_naive.png",
    )


if __name__ == "__main__":
    main()
