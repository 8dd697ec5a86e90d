"""The packs of a folder or a metadataset, and how often they come in an epoch."""

import shutil
from pathlib import Path

import pytest

from task_encoders.loading.packed_folder import PackedFolder, PackedFolderError
from tests.helpers.legacy_packs import text_folder
from tests.helpers.unpacked_folders import blend_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a with packs 00 to 02, b with 00 to 05."""
    root = tmp_path_factory.mktemp("folders")
    for name, size in (("a", 3), ("b", 6)):
        text_folder(root / name, size)
    return root


def keys(path: Path | str, split: str = "train") -> list[str]:
    """Each pack, as 'folder/number'."""
    folder = PackedFolder(path, split=split)
    root = [shard.path.parent.name for shard in folder.shards for _ in range(shard.num_packs)]
    return [f"{root[folder.order[i]]}{int(pack.key)}" for i, pack in enumerate(folder)]


def blend(folders: Path, *entries: str, split: str = "train") -> Path:
    return blend_of(folders / "blend.yaml", entries, splits=(split,))


def test_weights_that_are_the_numbers_of_packs(
    folders: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = blend(folders, "path: a, weight: 3", "path: b, weight: 6")
    assert keys(path) == ["b0", "a0", "b1", "b2", "a1", "b3", "b4", "a2", "b5"]
    assert not caplog.records


def test_other_weights(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An epoch is as long as each pack needs to come once; what comes more often is said."""
    path = blend(folders, "path: a, weight: 1", "path: b, weight: 1")
    found = keys(path)
    assert found[:6] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found[6:] == ["a0", "b3", "a1", "b4", "a2", "b5"]
    assert f"an epoch has 12 packs: 6 of the 3 of {folders}/a, 6 of the 6 of" in caplog.text
    blend(folders, "path: a, weight: 1", "path: b, weight: 0.001")
    with pytest.raises(PackedFolderError, match="by weight, an epoch would have 6006 packs"):
        PackedFolder(path)


def test_subsets_and_repetitions(folders: Path) -> None:
    twice = "path: b, repetitions: 2, subset: {range: [1, 4]}"
    path = blend(folders, twice, "path: a, subset: {range: [1, end]}")
    assert keys(path) == ["b1", "b2", "a1", "b3", "b1", "b2", "a2", "b3"]
    blend(folders, "path: a, repetitions: 1.34")
    assert keys(path) == ["a0", "a1", "a2", "a0"]


def test_other_splits_have_each_pack_once(folders: Path) -> None:
    """One dataset after the other, as Energon validates."""
    entries = (f"path: {name}, weight: 1, split_part: train" for name in "ba")
    path = blend(folders, *entries, split="val")
    assert keys(path, "val") == ["b0", "b1", "b2", "b3", "b4", "b5", "a0", "a1", "a2"]


def test_what_is_no_folder_is_named(folders: Path, tmp_path: Path) -> None:
    packs = shutil.copytree(folders / "a", tmp_path / "a")
    with pytest.raises(PackedFolderError, match="no split 'dev', only train"):
        PackedFolder(packs, split="dev")
    (packs / ".nv-meta" / "split.yaml").write_text("split_parts: [")
    with pytest.raises(
        PackedFolderError, match=r"\.nv-meta cannot be read .*verify --discard, then run"
    ):
        PackedFolder(packs)
    shutil.rmtree(packs / ".nv-meta")
    for path in (packs, packs / "nothing"):
        with pytest.raises(PackedFolderError, match="neither a packed folder nor a metadataset"):
            PackedFolder(path)
    (packs / "packed_seq_dataset.idx").touch()
    with pytest.raises(PackedFolderError, match=r"dataset\.idx and \.bin cannot be read"):
        PackedFolder(packs)
    path = blend(tmp_path, "path: nowhere, weight: 1")
    with pytest.raises(PackedFolderError, match=r"Energon cannot read it .*nowhere"):
        PackedFolder(path)
