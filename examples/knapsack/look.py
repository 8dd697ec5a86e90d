"""Stage 1: look at the data. A random dialogue, printed, and drawn beside its first picture."""

import io
import random
import textwrap
from pathlib import Path

from common import DemoDialogues, save_picture, stage
from matplotlib.axes import Axes
from PIL import Image

from task_encoders.samples import SampleError


@stage
def main(data: Path, pictures: Path) -> None:
    """Show a random dialogue with a picture, in English; another one every time."""
    dialogues = DemoDialogues(data)
    while True:
        try:
            sample, files = dialogues.read(random.randrange(len(dialogues)))
        except SampleError as error:
            print(f"a bad one: {error}")
            continue
        english = all((turn.prompt + turn.answer).isascii() for turn in sample.turns)
        if files and english:  # the font of the picture has no other letters
            break
    said = [f"User: {turn.prompt}\nAssistant: {turn.answer}" for turn in sample.turns]
    print("\n".join([f"{sample.key}: {', '.join(sample.images)}", *said]))
    lines = [line for text in said for line in textwrap.wrap(text.replace("\n", " "), 60)]

    def draw(image: Axes, text: Axes) -> None:
        image.imshow(Image.open(io.BytesIO(files[0])).convert("RGB"))
        image.axis("off")
        text.text(0, 0.9, "\n".join(lines[:20]), va="top", size=10)
        text.axis("off")

    save_picture(draw, pictures / "knapsack_look.png", columns=2, height=4)


if __name__ == "__main__":
    main()
