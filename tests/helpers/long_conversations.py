"""Conversations longer than a pack."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.runs.run import Run
from task_encoders.records.record import to_sample
from task_encoders.samples import SourceSample
from tests.helpers.datasets import WORDS, dialogue, image_bytes, make_run
from tests.helpers.formats import lines, write_file

#: (height, width) of the pictures.
SIZES = [(56, 56 + 28 * i) for i in range(5)]
Record = dict[str, Any]


def conversation(
    key: str, rng: np.random.Generator, num_turns: int, num_pictures: int, longest: int = 20
) -> Record:
    """A conversation whose answers name their turn, with pictures in front of any of them."""
    shown = Counter(rng.integers(num_turns, size=num_pictures).tolist())
    messages = [{"role": "system", "content": "Be kind."}] if rng.random() < 0.3 else []
    for i in range(num_turns):
        said, answered = (" ".join(rng.choice(WORDS, rng.integers(1, longest))) for _ in "qa")
        messages += [
            {"role": "user", "content": "<image>\n" * shown[i] + f"{i} of {key}: {said}?"},
            {"role": "assistant", "content": f"{answered} {i}."},
        ]
        if rng.random() < 0.1 and num_turns > 1 and i:
            messages[-1]["loss_weight"] = float(rng.choice([0.0, 0.5]))
    names = [f"{rng.integers(len(SIZES))}.jpg" for _ in range(num_pictures)]
    return {"id": key, "messages": messages, "images": names}


def spoken(*num_words: int, key: str = "c", **more: Any) -> Record:
    """A conversation with answers of so many words."""
    texts = [text for n in num_words for text in (f"What is {n}?", " ".join(["red"] * n))]
    return {"id": key, "messages": dialogue(*texts), **more}


def conversations(count: int, seed: int = 0, most: int = 60) -> list[Record]:
    """Conversations of 1 to `most` turns with 0 to 12 pictures."""
    rng = np.random.default_rng(seed)
    return [
        conversation(f"c{i}", rng, int(rng.integers(1, most + 1)), int(rng.integers(13)))
        for i in range(count)
    ]


def mixed_records() -> list[Record]:
    """Questions about three pictures among long conversations, and a copy of one of each."""
    questions: list[Record] = [
        {
            "id": f"q{i}",
            "image": f"{i % 3}.jpg",
            "question": f"What is {i}?",
            "answer": f"It is {i}.",
        }
        for i in range(8)
    ]
    long = conversations(8, seed=3, most=16)
    return [
        *(one for pair in zip(questions, long, strict=True) for one in pair),
        {**questions[3], "id": "copy"},
        {**long[3], "id": "long copy"},
    ]


def run_of(
    folder: Path, records: list[Record], name: str = "out", /, *, source: Any = None, **more: Any
) -> Run:
    """Return a run over records, in which long ones are cut unless `pack` says otherwise."""
    for i, (height, width) in enumerate(SIZES):
        write_file(folder / f"{i}.jpg", image_bytes(width, height))
    write_file(folder / "a.jsonl", lines(records))
    pack = {"on_overlong": "split_turns", "max_set_aside": 1, "seq_length": 256}
    pack |= more.pop("pack", {})
    options = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr", **(source or {})}
    return make_run(options, folder / name, pack=pack, **more)


def whole_samples(records: list[Record]) -> dict[str, SourceSample]:
    return {one["id"]: to_sample(one, one["id"], "bmr") for one in records}


def numbers(key: str) -> list[int]:
    """'c1[3:7]' -> [3, 7], the turns that a part trains; of a whole record []."""
    return [int(number) for number in re.findall(r"\d+", key.partition("[")[2])]
