"""The one model of manifest.json, for all that read packs."""

import json
from pathlib import Path

import pytest

from task_encoders.packs.manifest import Manifest, ManifestError, read_manifest
from tests.helpers.datasets import captioning_pairs, make_run, pack_all


def test_written_manifests_are_read(tmp_path: Path) -> None:
    output = {"media": "refer", "split": {"train": 0.7, "val": 0.3}}
    pack = {"seq_length": 512}
    written = pack_all(
        make_run(captioning_pairs(tmp_path / "d"), tmp_path / "o", output=output, pack=pack)
    )
    found = read_manifest(tmp_path / "o")
    assert isinstance(found, Manifest)
    assert found == written
    assert found.total("packs") == found.counts.packs["train"] > 1
    assert found.total("packs", "val") == found.counts.packs["val"] > 0
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version: Input should be 1 or 2"),
        ({"seq_length": "many"}, "seq_length: Input should be a valid integer"),
        ({"shards": None}, "shards: Input should be a valid array"),
        (None, "Invalid JSON"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: dict[str, object] | None, message: str) -> None:
    written = pack_all(make_run(captioning_pairs(tmp_path / "d", 6), tmp_path / "o"))
    text = "{" if change is None else json.dumps({**written.model_dump(), **change})
    (tmp_path / "o/manifest.json").write_text(text)
    with pytest.raises(ManifestError, match=f"manifest.json is damaged .*{message}"):
        read_manifest(tmp_path / "o")
