"""Packs in object storage: the same batches as from a local folder, by every reader."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.energon.epathlib import EPath
from torch.utils.data import DataLoader

from launch.data.packed_data import read_packed_data
from offline_packing.errors import StageError
from task_encoders.loading.folder_shards import PackedFolderError
from task_encoders.loading.packed_dataset import (
    get_packed_train_dataset,
    get_packed_val_dataset,
)
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.settings import PackingSettings
from task_encoders.storage.energon_paths import energon_url
from task_encoders.storage.paths import StorageError, path_of
from task_encoders.storage.remote_requests import RemoteError
from tests.helpers.energon_batches import assert_same, batches_of, loading
from tests.helpers.object_store import ObjectStore
from tests.helpers.packed_runs import SEQ_LENGTH
from tests.helpers.unpacked_folders import blend_of
from tests.world import World

SETTINGS = PackingSettings(packed=True, bmr=True)


@pytest.fixture
def folders(world: World) -> Callable[[str], Path]:
    """The same dialogues in each layout."""
    pack = {"seq_length": SEQ_LENGTH}
    return lambda layout: world.packed("bmr", pack=pack, output={"layout": layout})


@pytest.fixture
def store(
    object_store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path, str], str]:
    """Stores a folder; its URL, of the storage or of a profile of multi-storage-client."""
    options = {"base_path": bucket.removeprefix("s3://"), "endpoint_url": object_store.endpoint}
    provider = {"type": "s3", "options": {**options, "region_name": "us-east-1"}}
    config = {"profiles": {bucket[5:]: {"storage_provider": provider}}}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))

    def stored(folder: Path, protocol: str) -> str:
        object_store.put_folder(folder, f"{bucket}/out/packs")
        return f"{protocol}://{bucket[5:]}/out/packs"

    return stored


def make_encoder(settings: PackingSettings = SETTINGS) -> PackedTaskEncoder:
    return PackedTaskEncoder(seq_length=SEQ_LENGTH, max_pixels=50176, settings=settings)


@pytest.mark.parametrize(("layout", "protocol"), [("energon", "s3"), ("references", "msc")])
def test_energons_loader_saved_in_the_middle(
    layout: str, protocol: str, folders: Any, store: Any
) -> None:
    url, encoder = store(folders(layout), protocol), make_encoder()
    with loading(url, encoder, 1) as loader:
        found = list(itertools.islice(loader, 5))
        state = loader.save_state_rank()
    found += batches_of(url, encoder, 1, state=state)
    assert_same(found, batches_of(folders(layout), encoder, 1))
    assert not any(secret in repr(vars(state)) for secret in ("test-key", "test-secret"))


def test_packs_by_number(folders: Any, store: Any) -> None:
    """In a forked process, which has connections of its own."""
    path = folders("indexed")
    folder = PackedFolder(store(path, "msc"), make_encoder())
    found = DataLoader(folder, collate_fn=folder.collate, num_workers=1)  # type: ignore[arg-type]
    local = PackedFolder(path, make_encoder())
    assert_same(list(found), [local.batch([number]) for number in range(len(local))])


def test_a_blend_of_here_and_there(world: World, folders: Any, store: Any, tmp_path: Path) -> None:
    captions = world.packed("captioning", pack={"seq_length": SEQ_LENGTH})
    url = energon_url(store(folders("energon"), "s3"))
    found = []
    encoder = make_encoder(PackingSettings(packed=True))
    for number, other in enumerate((url, folders("energon"))):
        entries = f"path: {captions}, repetitions: 1", f"path: '{other}', repetitions: 2"
        blend = blend_of(tmp_path / f"{number}.yaml", entries)
        batches = batches_of(blend, encoder)
        assert len(PackedFolder(blend, encoder)) == len(batches)
        found.append([dataclasses.replace(one, __key__=[]) for one in batches])
    assert_same(*found)


def test_a_blend_that_names_a_url_as_it_is(folders: Any, store: Any, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
        f"    path: '{store(folders('energon'), 's3')}'\n"
    )
    remedy = r"Energon reads s3://BUCKET/\.\.\. as msc://_s3-BUCKET/\.\.\."
    with pytest.raises(PackedFolderError, match=remedy):
        PackedFolder(blend)
    with pytest.raises(StageError, match=remedy):
        read_packed_data(blend)


def test_forked_workers_have_connections_of_their_own(bucket: str) -> None:
    path = EPath(energon_url(bucket))
    inherited = path.fs.delegate  # what holds the connections
    child = os.fork()
    if not child:
        os._exit(int(path.fs.delegate is inherited))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.fs.delegate is inherited


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://no-such-bucket/packs", "(check that the bucket exists|does not exist)"),
        ("{}/nothing", "does not exist; check the address"),
        ("msc://no-such-profile/packs", 'Profile "no-such-profile"'),
        ("gopher://packs", "(Unsupported filesystem|by a profile of multi-storage-client)"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, why: str, bucket: str) -> None:
    url, encoder = url.format(bucket), make_encoder()
    for read in (
        PackedFolder,
        lambda path: get_packed_train_dataset(path, encoder),
        lambda path: get_packed_val_dataset(path, encoder),
    ):
        with pytest.raises((StorageError, RemoteError), match=why) as caught:
            read(url)
        text = str(caught.value)
        assert url in text
        assert text.count("\n") == 0


def test_one_name_for_one_place() -> None:
    assert str(path_of("msc://_s3-packs/out")) == "s3://packs/out"
    assert energon_url("s3://packs/out") == "msc://_s3-packs/out"
    assert path_of("out/packed") == Path("out/packed")
    assert energon_url("out/packed") == "out/packed"
    with pytest.raises(StorageError, match=r"Energon reads az:// by a profile .* as msc://PROFILE"):
        energon_url("az://packs/out")
