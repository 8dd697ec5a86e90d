"""Stage 3: every sample a row of one length; a longer one is dropped from its batch."""

from pathlib import Path

from common import (
    SEQ_LENGTH,
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
        kept = [[sample] for sample in samples if len(sample.tokens) <= SEQ_LENGTH]
        return make_batch(kept, SEQ_LENGTH, dialogues.pad_token_id)

    samples = dialogues.usable()
    batches = batches_of(samples, collate)
    dropped = len(samples) - sum(len(batch["input_ids"]) for batch in batches)
    show(batches)
    print(f"dropped: {dropped} samples of more than {SEQ_LENGTH} tokens")
    save_picture(
        lambda axes: draw_batch(axes, batches[0], f"Padded to {SEQ_LENGTH} tokens"),
        pictures / "knapsack_constrained.png",
    )


if __name__ == "__main__":
    main()
