"""Packs whose samples share prefixes, and the same samples packed without."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.datasets import WORDS, dialogue, image_bytes, write_json
from tests.helpers.tiny_families import encoder_options


def asked(root: Path) -> dict[str, Any]:
    """Dialogues on four pictures, some with another in the question; a few have none."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        (root / f"picture{number}.jpg").write_bytes(image_bytes(140 + 28 * number, 140))
    for i in range(160):
        first, *texts = (
            " ".join(rng.choice(WORDS, rng.integers(2, 12))) for _ in range(2 + 2 * (i % 2))
        )
        names = [f"picture{i % 4}.jpg"] if i % 11 else []
        more = [f"other{i}.jpg"] if names and i % 7 == 3 else []
        for name in more:
            (root / name).write_bytes(image_bytes(56, 84, shade=i))
        first = "<image>\n" * len(names) + first + " like <image>?" * len(more)
        content = {"messages": dialogue(first, *texts), "images": names + more}
        write_json(root / (f"q{i:03d}.json" if names else f"output_{i:08d}.json"), content)
    return {"format": "pairs", "path": str(root), "task": "bmr"}


def tree_folders(world: Any, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """Return packs of a `World`, and packs of the same samples as trees, some in a val split."""
    output = {"packs_per_shard": 2, "split": {"val": 0.3, "train": 0.7}}
    plain, trees = (
        world.packed(asked, pack={"seq_length": 1024, **more}, output=output, **sections)
        for more in ({}, {"share_prefixes": True})
    )
    return plain, trees


def asked_briefly(root: Path) -> dict[str, Any]:
    """Write four dialogues on each of four pictures, and one without."""
    rng = np.random.default_rng(1)
    root.mkdir(parents=True)
    for number in range(4):
        (root / f"picture{number}.jpg").write_bytes(image_bytes(56 + 28 * number, 84))
    for i in range(17):
        question, answer = (" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(2))
        names = [f"picture{i % 4}.jpg"] if i else []
        turns = dialogue("<image>\n" * len(names) + question, f"{answer} {i}")
        write_json(root / f"q{i:02d}.json", {"messages": turns, "images": names})
    return {"format": "pairs", "path": str(root), "task": "bmr"}


def few_trees(world: Any, family: str) -> tuple[Path, Path, Path]:
    """Return a family's tiny checkpoint, and packs measured with it of few tokens: samples as
    trees, and the same samples whole."""
    checkpoint: Path = world.checkpoint(family)
    model = {"family": family, "processor": str(checkpoint), "max_pixels": None}
    model |= encoder_options(family)
    trees, whole = (
        world.packed(asked_briefly, model=model, pack={"seq_length": 512, **more})
        for more in ({"share_prefixes": True}, {})
    )
    return checkpoint, trees, whole
