"""Draw a document as `preview` spells it: the picture in docs/records.md.

    python tools/preview_picture.py [docs/images/document.png]

Text that carries loss stands on blue; each picture is drawn where its tokens are.
"""

import io
import json
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from PIL import Image, ImageDraw

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.report.preview import SubSamplePreview, preview
from offline_packing.runs.run import Run
from offline_packing.write.write import write

RECORD = {"id": "0", "text": "Intro <image> middle <image> end", "images": ["a.png", "b.png"]}
COLOURS = {"text": "#cfe3f5", "control": "#e8e8e8"}


def packed(folder: Path) -> Run:
    """A run over the record, packed."""
    for name, colour in zip(RECORD["images"], ("#c0392b", "#27ae60"), strict=True):
        image = Image.new("RGB", (112, 84), "#f4f1ea")
        ImageDraw.Draw(image).ellipse((24, 10, 88, 74), colour)
        image.save(folder / name)
    (folder / "a.jsonl").write_text(json.dumps(RECORD))
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "captioning"}
    output = {"path": str(folder / "out")}
    run = Run(parse_config({"source": source, "output": output}), LocalEngine(0))
    samples = measure(run)
    write(run, samples, plan(run, samples))
    return run


def draw(axis: plt.Axes, shown: SubSamplePreview) -> None:
    """Pieces of a sample from left to right."""
    pictures, x = iter(shown.images), 0.0
    for span in shown.spans:
        for piece in span.pieces:
            if piece.kind == "vision":
                picture = np.asarray(Image.open(io.BytesIO(next(pictures).picture)))
                axis.add_artist(
                    AnnotationBbox(OffsetImage(picture, zoom=0.55), (x + 7, 1), pad=0.1)
                )
                axis.text(x + 7, -0.1, piece.text.strip("[]"), ha="center", fontsize=8)
                x += 15
                continue
            colour = COLOURS["text"] if span.weight else COLOURS["control"]
            text = piece.text.strip("<|>")
            box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "round,pad=0.25"}
            size = 10 if span.weight else 7
            axis.text(x, 1, text, va="center", fontsize=size, family="monospace", bbox=box)
            x += len(text) * (1.12 if span.weight else 0.82) + 1.6
    axis.set_xlim(-1, x)
    axis.set_ylim(-0.5, 2.2)
    axis.axis("off")


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/document.png")
    with tempfile.TemporaryDirectory() as folder:
        (pack,) = preview(packed(Path(folder)))
    figure, axis = plt.subplots(figsize=(11, 1.5))
    draw(axis, pack.sub_samples[0])
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
