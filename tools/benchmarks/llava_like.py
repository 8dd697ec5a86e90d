"""Samples with the lengths of LLaVA's instructions: a JSON array, and an image each.

    python tools/benchmarks/llava_like.py out/llava --samples 400
    python examples/neva/preprocess_dataset.py --data_path=out/llava/llava.json …
    python tools/benchmarks/llava_like.py out/vqa --samples 400 --questions 5 --side 448

One to four rounds of words; texts are log-normal, with some 200 tokens in the middle and 900 in one
of a hundred. Images are squares of noise: only their size decides the tokens. With --questions,
samples are single questions with answers of a few words, that many on each image.
"""

import io
import json
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
from PIL import Image

_WORDS: Final = "red green blue circle square above below left right of the a picture shows".split()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", default=400, show_default=True)
@click.option("--side", default=336, show_default=True, help="Of the images, in pixels.")
@click.option("--questions", default=0, help="Samples per image, each one short question.")
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, samples: int, side: int, questions: int, seed: int) -> None:
    """Write FOLDER/llava.json and FOLDER/images."""
    rng = np.random.default_rng(seed)
    images = folder / "images"
    images.mkdir(parents=True)
    records = []
    for i in range(samples):
        name = f"{i // max(questions, 1):06d}.jpg"
        if not (images / name).exists():
            coarse = rng.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(coarse).resize((side, side)).save(buffer, "JPEG", quality=90)
            (images / name).write_bytes(buffer.getvalue())
        turns = _question(rng) if questions else _rounds(rng)
        records.append({"id": str(i), "image": name, "conversations": turns})
    (folder / "llava.json").write_text(json.dumps(records))
    click.echo(f"wrote {samples:,} samples to {folder}")


def _question(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Messages of a question of 5 to 11 words about an image, answered in 1 to 3."""
    question, answer = (" ".join(rng.choice(_WORDS, rng.integers(*n))) for n in ((5, 12), (1, 4)))
    return [{"from": "human", "value": f"<image>\n{question}?"}, {"from": "gpt", "value": answer}]


def _rounds(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Messages of a conversation about an image."""
    num_words = int(min(np.exp(rng.normal(5.1, 0.75)), 1500))
    num_messages = 2 * int(rng.integers(1, 5))
    cuts = np.sort(rng.choice(max(num_words, 16), num_messages - 1, replace=False))
    words = rng.choice(_WORDS, max(num_words, 16))
    texts = [" ".join(["So", *part]) for part in np.split(words, cuts)]
    texts[0] = f"<image>\n{texts[0]}"
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


if __name__ == "__main__":
    main()
