"""Many pictures on one page, to look at."""

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageOps

from offline_packing.demo.depiction import INK, PALE_INK, load_font

_LABEL_HEIGHT = 18


def contact_sheet(
    paths: Sequence[str | os.PathLike[str]],
    out_png: str | os.PathLike[str],
    *,
    num_columns: int = 5,
    cell_size: int = 220,
) -> Path:
    """Draw the upright pictures at `paths` in a grid, each with its name and size, and save a PNG.

    Pictures larger than `cell_size` pixels are reduced, smaller ones keep their size. Returns the
    path written. Raises ValueError if `paths` is empty, OSError for a picture that cannot be read.
    """
    if not paths:
        raise ValueError("contact sheet: no pictures given; pass at least one path")
    num_columns = min(num_columns, len(paths))
    num_rows = -(-len(paths) // num_columns)
    step_x, step_y = cell_size + 12, cell_size + _LABEL_HEIGHT + 12
    sheet = Image.new("RGB", (num_columns * step_x, num_rows * step_y), (246, 246, 248))
    draw = ImageDraw.Draw(sheet)
    for i, path in enumerate(paths):
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
        label = f"{Path(path).name}  {image.width}x{image.height}"
        image.thumbnail((cell_size, cell_size))
        x, y = i % num_columns * step_x + 6, i // num_columns * step_y + 6
        left, top = x + (cell_size - image.width) // 2, y + (cell_size - image.height) // 2
        sheet.paste(image, (left, top))
        draw.rectangle(
            (left - 1, top - 1, left + image.width, top + image.height), outline=PALE_INK
        )
        draw.text((x + cell_size / 2, y + cell_size + 3), label, INK, load_font(11), anchor="ma")
    out_png = Path(out_png)
    sheet.save(out_png, "PNG")
    return out_png
