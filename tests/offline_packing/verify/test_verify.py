"""verify names damage to shards, and measured lengths that are wrong."""

import re
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offline_packing.errors import ConfigError
from offline_packing.runs.artifacts import open_plan
from offline_packing.runs.run import Run
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verify import Drawn, verify
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.sample_encoder import SampleLength
from task_encoders.samples import SourceSample
from tests.helpers.command import invoke
from tests.helpers.datasets import (
    captioning_pairs,
    config_file,
    index_rows,
    make_run,
    pack_all,
    packed_run,
)
from tests.helpers.outputs import flip_byte


@pytest.fixture
def run(captions: Path, tmp_path: Path) -> Run:
    """Packs that a test may change."""
    return packed_run(captions, tmp_path / "out")


def flip_bit(root: Path) -> None:
    with tarfile.open(root / "train-000001.tar") as tar:
        offset = next(m for m in tar if not m.name.endswith("json")).offset_data
    flip_byte(root / "train-000001.tar", offset + 100)


def swap_shards(root: Path) -> None:
    first, second = root / "train-000000.tar", root / "train-000001.tar"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def change_length(root: Path) -> None:
    path = root / "train-000001.tar"
    data = path.read_bytes()
    found = re.search(rb'"num_tokens":\[(\d)', data)
    assert found is not None
    flipped = b"9" if found[1] != b"9" else b"8"
    path.write_bytes(data[: found.start(1)] + flipped + data[found.end(1) :])


def change_text(root: Path) -> None:
    path = root / "train-000001.tar"
    data = path.read_bytes()
    start = data.index(b'"captions":["') + len(b'"captions":["')
    path.write_bytes(data[:start] + b"#" + data[start + 1 :])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip_bit, "image bytes differ from the source"),
        (swap_shards, "does not hold the packs"),
        (change_length, "meta.num_tokens is not what was measured"),
        (change_text, "text differs from the source"),
    ],
)
def test_verify_names_the_damage(run: Run, damage: Callable[[Path], None], problem: str) -> None:
    assert verify(run, deep=True).ok
    damage(run.workspace.root)
    result = verify(run, deep=True)
    assert not result.ok
    assert any(problem in found for found in result.problems), result.problems


def test_verify_finds_a_wrong_length(
    captions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measuring encoder that is off by one in one sample."""
    run = make_run(captions, tmp_path / "out")
    true_measure = FamilyEncoder.measure

    def off_by_one(encoder: FamilyEncoder, sample: SourceSample, *args: Any) -> SampleLength:
        length = true_measure(encoder, sample, *args)
        is_wrong = sample.key == "part0/000004"
        return replace(length, num_tokens=length.num_tokens + is_wrong)

    monkeypatch.setattr(FamilyEncoder, "measure", off_by_one)
    pack_all(run)
    result = verify(run, deep=True)
    assert result.num_problems == 1
    assert re.search(r"'part0/000004': encodes to \d+ tokens, measured", result.problems[0])


def test_verify_counts(run: Run) -> None:
    manifest = pack_all(run)
    result = verify(run, deep=True)
    tokens = sum(row["num_tokens"] for row in index_rows(run))
    assert result == VerifyResult(
        num_shards=len(manifest.shards),
        num_packs=manifest.counts.packs["train"],
        num_samples=40,
        num_row_tokens=tokens,
        num_set_aside=0,
        num_images=40,
        num_videos=0,
        num_tokens=tokens,
    )


def test_hashes_alone_and_drawn_packs(run: Run) -> None:
    found = verify(run, hash_only=True)
    assert (found.problems, found.num_samples) == ([], 40)
    flip_bit(run.workspace.root)
    assert "its hash differs" in verify(run, hash_only=True).problems[0]
    some = verify(run, drawn=Drawn(0.01))
    assert (some.problems, some.num_packs) == ([], 1)
    swap_shards(run.workspace.root)
    problems = verify(run, drawn=Drawn(0.999)).problems
    assert any("train-000000.tar" in one for one in problems)  # the bit is in the other


@pytest.mark.parametrize("layout", ["energon", "references", "indexed"])
def test_samples_drawn_at_random(captions: Path, tmp_path: Path, layout: str) -> None:
    output = {"packs_per_shard": 2, "layout": layout, "split": {"train": 0.6, "val": 0.4}}
    run = make_run(captions, tmp_path / "out", output=output, pack={"seq_length": 256})
    packs = sum(pack_all(run).counts.packs.values())
    some = verify(run, drawn=Drawn(12), deep=True)
    assert some.problems == []
    assert 12 <= some.num_samples == some.num_images < 40
    assert some.num_packs < packs
    assert verify(run, drawn=Drawn(12)).num_samples == some.num_samples
    assert verify(run, drawn=Drawn(0.999)).num_packs == packs
    seeds = {tuple(Drawn(12, seed).packs(open_plan(run).packs)) for seed in range(5)}
    assert len(seeds) > 1


def test_options_of_parts(run: Run, tmp_path: Path) -> None:
    config = config_file(tmp_path / "pack.yaml", run.config)
    assert "drawn with seed 3" in invoke("verify", config, "--samples=2", "--seed=3").output
    assert "not opened" in invoke("verify", config, "--hash-only").output
    with pytest.raises(ConfigError, match="leave out --deep and --samples"):
        invoke("verify", config, "--hash-only", "--deep")


def test_a_picture_that_is_damaged_in_the_source_is_named_as_such(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 8)
    picture = root / "part0" / "000000.png"
    flip_byte(picture, picture.stat().st_size // 2)  # shows when its pixels are read
    run = packed_run(root, tmp_path / "out")
    result = verify(run, deep=True)
    assert (result.num_problems, result.num_in_source) == (1, 1)
    assert result.problems[0].endswith(
        "; the source has the same bytes: repair or remove the sample in part0/000000.png"
    )
