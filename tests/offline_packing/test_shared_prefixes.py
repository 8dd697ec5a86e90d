"""Packs whose samples share prefixes, from plan to rows: each medium once, every reader that does
not know such packs refuses them, and what others make of them."""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from megatron.energon import get_train_dataset
from megatron.energon.errors import FatalSampleError

from offline_packing.layouts.shards import ShardFragment, estimate_pack_bytes
from offline_packing.online.energon import OnlineTaskEncoder, get_online_train_dataset
from offline_packing.report.pages import render_packs
from offline_packing.report.preview import preview
from offline_packing.report.preview_text import render_pack
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import Run
from offline_packing.upkeep.blend import blend
from offline_packing.verify.verify import verify
from task_encoders import concatenate
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettingsError
from task_encoders.storage.energon_paths import energon_path
from tests.helpers.datasets import index_rows, packed_run
from tests.helpers.energon_batches import batches_of
from tests.helpers.outputs import members_of, samples_of
from tests.helpers.pages import Elements
from tests.helpers.shared_media import MODEL
from tests.world import World, task_encoder

SEQ_LENGTH = 768
NUM_SAMPLES, NUM_MEDIA = 31, 28
#: Raised for a sample, or already by the manifest.
Refusal = (FatalSampleError, PackingSettingsError)
REFUSED = r"holds samples that share prefixes.*train it with launch\.train"

Options = dict[str, Any]


def options(media: str = "copy", share: Any = True, **sections: Options) -> dict[str, Options]:
    pack = {"seq_length": SEQ_LENGTH, "share_prefixes": share, **sections.pop("pack", {})}
    output = {"media": media, "packs_per_shard": 2, **sections.pop("output", {})}
    return {"model": MODEL, **sections, "pack": pack, "output": output}


@pytest.fixture
def shared(world: World) -> Run:
    return world.run("shared media", **options())


@pytest.fixture
def plain(world: World) -> Run:
    """The same samples, packed whole."""
    return world.run("shared media", **options(share=False))


def test_each_medium_of_a_tree_is_a_member_once(shared: Run, plain: Run) -> None:
    media = [
        [name for name in members_of(run.workspace.root) if not name.endswith(".json")]
        for run in (shared, plain)
    ]
    plan, rows = open_plan(shared).packs, index_rows(shared)
    firsts = plan.sample_ids[np.asarray(plan.branches) == 0]
    assert len(media[0]) == sum(len(rows[number]["media"]) for number in firsts) < 15
    assert len(media[1]) == NUM_MEDIA
    manifests = [require_manifest(run.workspace.root) for run in (shared, plain)]
    assert [(one.version, one.counts.packed) for one in manifests] == [(2, 31), (1, 31)]


def test_bytes_are_estimated_without_what_is_shared(shared: Run, plain: Run) -> None:
    for run in (shared, plain):
        estimated = estimate_pack_bytes(open_index(run), open_plan(run).packs)
        shards = require_manifest(run.workspace.root).shards
        fragments = [(run.workspace.write / line.name).with_suffix(".json") for line in shards]
        found = [pack.size for path in fragments for pack in ShardFragment.load(path).packs]
        assert len(found) == len(estimated)
        # at most what JSON is estimated too large, in blocks of a tar
        assert all(0 <= more <= 512 * 40 for more in estimated - np.array(found))


def test_verify_sees_what_is_not_as_planned(
    world: World, shared: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("offline_packing.layouts.base.trees_of", lambda samples: [])
        run = packed_run(world.source("shared media"), tmp_path / "out", **options())
        assert any("meta.trees is not what was planned" in one for one in verify(run).problems)
    # Rows that do not give back what went in.
    split_row = concatenate.split_row

    def changed(row: Any) -> list[Any]:
        for one in (parts := split_row(row)):
            one.position_ids.add_(1)
            one.pixel_values.fill_(7)
        return parts

    monkeypatch.setattr(concatenate, "split_row", changed)
    problems = verify(shared, deep=True).problems
    assert any("it has other position_ids and pixel_values than" in one for one in problems)


@pytest.mark.parametrize("media", ["refer", pytest.param("copy", marks=pytest.mark.exhaustive)])
def test_every_reader_refuses_packs_that_it_does_not_know(
    media: str, world: World, tmp_path: Path
) -> None:
    run, whole = (world.run("shared media", **options(media, share=own)) for own in (True, False))
    root, blended = tmp_path / "packed", tmp_path / "blend.yaml"
    shutil.copytree(run.workspace.root, root)
    (root / "manifest.json").unlink()
    blended.write_text(blend([run.workspace.root, whole.workspace.root], each_once=True))
    old, new = task_encoder(run, **MODEL, trees=False), task_encoder(run, **MODEL)
    by_energon: Any = energon_path(root)
    plain = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    readers: list[Callable[[PackedTaskEncoder], Any]] = [
        lambda encoder: batches_of(by_energon, encoder, dataset_of=get_train_dataset, **plain),
        lambda encoder: batches_of(root, encoder),
        lambda encoder: batches_of(blended, encoder),
        lambda encoder: list(map(PackedFolder(root, encoder).row, range(2))),
        lambda encoder: PackedFolder(root, encoder).batch([0, 1]),
        lambda encoder: list(map(PackedFolder(blended, encoder).row, range(5))),
    ]
    for number, read in enumerate(readers):
        with pytest.raises(Refusal, match=REFUSED):
            read(old)
        assert read(new), number
    batches = batches_of(blended, new, micro_batch_size=2)
    keys = Counter(key for batch in batches for key in batch.sub_sample_keys)
    assert (len(keys), *{*keys.values()}) == (NUM_SAMPLES, 2)
    settings = {"seq_length": SEQ_LENGTH, "settings": old.settings, "trees": False}
    online = OnlineTaskEncoder(**MODEL, **settings)
    with pytest.raises(Refusal, match=REFUSED):
        batches_of(str(by_energon), online, dataset_of=get_online_train_dataset)


def test_they_are_packed_again_as_whole_samples(shared: Run, plain: Run, tmp_path: Path) -> None:
    packs = {"format": "packs", "path": str(shared.workspace.root), "task": "vqa"}
    runs = [packed_run(packs, tmp_path / f"{own}", **options(share=own)) for own in (False, True)]
    assert [verify(run, deep=True).problems for run in runs] == [[], []]
    again, expected = (
        {one.key: (one.turns, media) for _, one, media in samples_of(run)}
        for run in (runs[0], plain)
    )
    assert len(again) == NUM_SAMPLES
    assert again == expected
    tokens = [require_manifest(run.workspace.root).counts.tokens for run in runs]
    assert tokens[1] < 0.7 * tokens[0]


def test_preview_shows_a_trunk_with_its_branches(shared: Run, plain: Run) -> None:
    packs = list(preview(shared, num_packs=100))
    page = render_packs(packs, "vqa").decode()
    elements, shown = Elements(page), click.unstyle("".join(map(render_pack, packs)))
    trunks = [sub for pack in packs for sub in pack.sub_samples if sub.num_branches]
    assert len(trunks) > 4
    assert "each branch (↳) below it sees the trunk and itself" in page
    for trunk in trunks:
        assert trunk.num_loss_tokens == 0
        assert len(trunk.images) + len(trunk.videos) == 1
        assert any(piece.kind == "vision" for span in trunk.spans for piece in span.pieces)
    subs = [sub for pack in packs for sub in pack.sub_samples]
    for number, sub in enumerate(subs):
        if sub.num_branches:
            branches = subs[number + 1 :][: sub.num_branches]
            assert all(one.is_branch and not one.images + one.videos for one in branches)
        else:
            (turn,) = sub.sample.turns
            assert turn.answer in elements.text
            assert ("↳ " + sub.sample.key in elements.text) == sub.is_branch
    assert elements.names["img"] == sum(len(sub.images + sub.videos) for sub in subs) < 15
    assert f"trunk of {trunks[0].num_branches} samples" in elements.text
    assert re.search(r"#\d+ trunk of \d+ samples  [\d,]+ tokens", shown)
    assert "trunk" not in render_packs(list(preview(plain, num_packs=100)), "vqa").decode()
