"""Conversations longer than a pack, and a check that `split_turns` packed all that they train."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.runs.run import Run, open_encoder
from task_encoders.records.record import to_sample
from task_encoders.samples import SourceSample, Turn
from tests.helpers.datasets import WORDS, dialogue, image_bytes, make_run
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import samples_of, set_aside_in_plan

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


def trained(run: Run, sample: SourceSample) -> list[tuple[int, float]]:
    """Return the tokens with loss of a sample, and their weights."""
    text = open_encoder(run.config.model).tokenize(sample, SIZES[:1] * len(sample.images))
    pairs = zip(text.tokens.tolist(), text.loss_weights.tolist(), strict=True)
    return [(token, weight) for token, weight in pairs if weight]


def numbers(key: str) -> list[int]:
    """'c1[3:7]' -> [3, 7], the turns that a part trains; of a whole record []."""
    return [int(number) for number in re.findall(r"\d+", key.partition("[")[2])]


def check_packed(run: Run, records: list[Record]) -> None:
    """Every trained token of what fits is trained once, and pictures stand where they belong."""
    pictures = [image_bytes(width, height) for height, width in SIZES]
    found: dict[str, list[tuple[SourceSample, list[bytes]]]] = {}
    for _, sample, media in samples_of(run):
        found.setdefault(sample.key.partition("[")[0], []).append((sample, media))
    lost = [row["key"] for row in set_aside_in_plan(run)]
    for key, whole in whole_samples(records).items():
        parts = sorted(found.get(key, []), key=lambda part: numbers(part[0].key))
        if key in lost:
            assert not parts
            continue
        aside = [range(*numbers(one)) for one in lost if one.partition("[")[0] == key]
        turns = [
            replace(turn, weight=0.0) if any(i in own for own in aside) else turn
            for i, turn in enumerate(whole.turns)
        ]
        expected = trained(run, replace(whole, turns=tuple(turns)))
        assert [one for sample, _ in parts for one in trained(run, sample)] == expected
        belong = iter(whole.images)
        of_turn = {
            text_of(turn): [
                pictures[int(next(belong)[0])] for _ in range(turn.prompt.count("<image>"))
            ]
            for turn in whole.turns
        }
        for sample, media in parts:
            assert sample.system == whole.system
            shown = iter(media)
            for i, turn in enumerate(sample.turns):
                own = [next(shown) for _ in range(turn.prompt.count("<image>"))]
                theirs = of_turn[text_of(turn)]
                assert own == theirs or (i == 0 and own[len(own) - len(theirs) :] == theirs)
            assert next(shown, None) is None


def text_of(turn: Turn) -> str:
    """A question without marks; each is another one."""
    return turn.prompt.replace("<image>\n", "").replace("<image>", "")
