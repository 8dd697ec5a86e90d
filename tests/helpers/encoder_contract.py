"""What every encoder must hold for every sample: what is measured and stored is what is encoded,
and what transformers itself makes of it."""

import ast
import functools
import io
import math
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from PIL import Image, ImageOps

from task_encoders.media.image import read_image_header
from task_encoders.media.video_file import read_video_header
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SourceSample

#: By name, something and what it should equal.
Pairs = Mapping[str, tuple[Any, Any]]


def own_pairs(
    encoder: Any,
    sample: SourceSample,
    images: list[bytes],
    videos: list[bytes],
    encoded: EncodedSample,
) -> Pairs:
    """What is measured and tokenized of a sample, with what is encoded of it."""
    headers = [read_image_header(io.BytesIO(data)) for data in images]
    sizes = [(header.height, header.width) for header in headers]
    clips = [read_video_header(io.BytesIO(data)) for data in videos]
    measured = encoder.measure(sample, sizes, clips)
    tokenized = encoder.tokenize(sample, sizes, clips)
    rows = len(encoded.pixel_values) + len(encoded.pixel_values_videos)
    grids = np.concatenate([encoded.image_grid_thw, encoded.video_grid_thw])
    expected = [[*grid] for grid in measured.grid_thw]
    if videos and not len(encoded.video_grid_thw):  # its steps are pictures among the images
        of_videos = expected[len(images) :]
        steps = [[1, *grid[1:]] for grid in of_videos for _ in range(grid[0])]
        expected = expected[: len(images)] + steps
    names = ("tokens", "labels", "loss_weights")
    return {
        "length": (measured.num_tokens, len(encoded.tokens)),
        "length of the loss": (measured.num_loss_tokens, (encoded.labels != IGNORE_INDEX).sum()),
        "patches": (measured.num_vision_patches, rows),
        "patches of the grids": (grids.prod(1).sum(), rows),
        "grids": (sorted(expected), sorted(grids.tolist())),
        **{f"own {name}": (getattr(tokenized, name), getattr(encoded, name)) for name in names},
    }


def unequal(pairs: Pairs) -> list[str]:
    """Names of the pairs that differ, in shape or in a value."""
    return [name for name, pair in pairs.items() if not np.array_equal(*pair)]


def opened(data: bytes) -> Image.Image:
    """An image upright, and in RGB unless a processor composes it on white."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return image if image.has_transparency_data else image.convert("RGB")


VERSION = Version(metadata.version("transformers"))


def needs_transformers(version: str, differs: str) -> None:
    """Skip a test that compares with what an older transformers, which trains our packs all the
    same, makes otherwise."""
    if Version(version) > VERSION:
        pytest.skip(f"transformers {VERSION} < {version} {differs}")


@functools.cache
def transformers_function(family: str, name: str, method_of: str | None = None) -> Any:
    """A function, or a method without its class, of a family's video processor. Without torchvision
    its module does not import, and that has no build that goes with PyTorch's for CPUs; the
    functions need only torch and numpy."""
    needs_transformers("5.10", "has other functions for videos")
    spec: Any = find_spec("transformers")
    folder = Path(spec.submodule_search_locations[0])
    path = folder / f"models/{family}/video_processing_{family}.py"
    tree: Any = ast.parse(path.read_text())
    if method_of is not None:
        tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == method_of)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    function.args.kwarg = None
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    namespace: dict[str, Any] = {"torch": torch, "math": math, "np": np}
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)
    return namespace[name]
