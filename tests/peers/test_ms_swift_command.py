"""Commands of ms-swift on packs: the one in docs/integrations.md, and what is wrong in others."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.pipelines.train.sft import SwiftSft
from swift.utils import parse_args

from tests.helpers.hf_videos import with_processor
from tests.helpers.ms_swift import CPUArguments
from tests.helpers.peers import check_contradictions, open_packs

PAGE = Path(__file__).parents[2] / "docs/integrations.md"


@pytest.fixture(scope="module")
def case(case: tuple[Path, Path]) -> tuple[Path, Path]:
    return with_processor(case[0]), case[1]


def datasets(checkpoint: Path, packed: Path, output: Path, *more: str) -> list[Any]:
    """The samples that a pipeline of the documented command trains on, with these options."""
    (command,) = re.findall(r"`(swift sft [^`]*)`", PAGE.read_text())
    names = {"FOLDER": str(checkpoint), "out/packed": str(packed)}
    words = [names.get(word, word) for word in shlex.split(command)[2:]]
    model = ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    options = ["--output_dir", str(output), "--use_cpu", "true", "--torch_dtype", "float32"]
    args, rest = parse_args(CPUArguments, [*words, *model, *options, *more])
    assert not rest
    return SwiftSft._prepare_dataset(SimpleNamespace(args=args, template=SimpleNamespace()))


def test_the_documented_command_trains_every_pack(case: tuple[Path, Path], tmp_path: Path) -> None:
    train, validation = datasets(*case, tmp_path)
    packs = open_packs(case[1])
    assert len(train) == len(packs) > 3
    assert validation is None
    for number in range(len(packs)):
        lengths = [sample["length"] for sample in train[number]]
        assert lengths == packs.batch([number]).cu_lengths[0].diff().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--packing false", "set --packing true"),
        ("--train_dataloader_shuffle true", "set --train_dataloader_shuffle false"),
        ("--group_by_length true", "no --group_by_length"),
        ("--dataset {packed} other.jsonl", "give one --dataset"),
        ("--val_dataset {packed}", "no packs in its val split"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    options: str, message: str, case: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        datasets(*case, tmp_path, *options.format(packed=case[1]).split())
    assert "\n" not in str(caught.value)


def test_packs_that_contradict_model_or_environment_are_refused(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    check_contradictions(
        lambda model, packs: datasets(with_processor(model), packs, tmp_path),
        case,
        tmp_path / "other",
    )
