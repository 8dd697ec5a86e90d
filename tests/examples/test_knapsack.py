"""The five stages in examples/knapsack: what the document prints, their pictures, less padding."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from offline_packing.demo.generate import generate_demo_dataset

STAGES = ("look", "naive_padding", "constrained_padding", "packing", "multimodal")
#: Printed in the document: greedy, then bin packing. With two workers each takes half of the
#: numbers; these are what the program of the document gives then.
PRINTED = {
    ("greedy", 0): [[*range(1, 14)], [*range(14, 20)], [20, 21, 22, 23], [24]],
    ("greedy", 2): [[*range(1, 13)], [*range(13, 19)], [19, 20, 21, 22], [23, 24]],
    ("binpack", 0): [
        [24, 23, 22, 21, 10],
        [20, 19, 18, 17, 16, 9, 1],
        [15, 14, 13, 12, 11, 8, 7, 6, 5, 4, 3, 2],
    ],
    ("binpack", 2): [[*range(12, 0, -1)], [24, 23, 22, 21], [20, 19, 18, 17, 16], [15, 14, 13]],
}


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Any]]:
    """The modules of the stages, imported as their folder's programs are."""
    folder = str(Path(__file__).parents[2] / "examples" / "knapsack")
    sys.path.insert(0, folder)
    logger = logging.getLogger("offline_packing")  # the programs log less
    level = logger.level
    yield {name: importlib.import_module(name) for name in STAGES}
    logger.setLevel(level)
    sys.path.remove(folder)
    for name in (*STAGES, "common"):
        del sys.modules[name]


@pytest.mark.parametrize(("strategy", "num_workers"), PRINTED)
def test_packs_of_numbers_are_those_of_the_document(
    programs: dict[str, Any], strategy: str, num_workers: int
) -> None:
    packs = programs["packing"].packs_of_numbers(strategy, num_workers)
    assert [[int(number) for number in pack] for pack in packs] == PRINTED[strategy, num_workers]


@pytest.mark.exhaustive
def test_every_stage_prints_and_draws_and_padding_falls(
    programs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, printed = tmp_path / "data", {}
    generate_demo_dataset(data, num_samples=300, progress=False)
    for name in STAGES:
        programs[name].main.callback(data, tmp_path)
        printed[name] = capsys.readouterr().out
        (picture,) = re.findall(r"Saved (\S+)", printed[name])
        with Image.open(picture) as image:
            assert len(image.convert("RGB").getcolors(1 << 16)) > 20
    assert "Assistant: " in printed["look"]
    assert re.search(r"\[tensor\(\[24\]\), .*, tensor\(\[10\]\)\]\n", printed["packing"])
    for name, rows in (("naive_padding", 8), ("constrained_padding", 8), ("multimodal", 8)):
        assert re.search(rf"input_ids torch.Size\(\[{rows}, \d+\]\)\n", printed[name])
        assert f"images {rows}\n" in printed[name]
    padding = [
        float(share)
        for name in ("naive_padding", "constrained_padding", "multimodal")
        for share in re.findall(r"batch, ([\d.]+)% of all", printed[name])
    ]
    assert len(padding) == 4  # two strategies in the last stage
    assert padding == sorted(padding, reverse=True)
    assert padding[1] > 50 > 25 > padding[2] > 10 > padding[3]  # few packs: delta weighs more
    assert "'bad_json': 1, 'image_count_mismatch': 1, 'overlong'" in printed["multimodal"]
