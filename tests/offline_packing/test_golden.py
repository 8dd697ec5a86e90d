"""The bytes of a small output, as version 1 writes them: they must stay, since outputs that people
have are repaired, compared and blended by them."""

import hashlib
import json
import struct
import zlib
from pathlib import Path

import pytest

from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.runs.run import open_encoder
from offline_packing.verify.verify import verify
from tests.helpers.datasets import make_run, packed_run

#: sha256, first 16 digits. What depends on versions of libraries is left out.
GOLDEN = {
    ".nv-meta/dataset.yaml": "b274b7e830ff943e",
    ".nv-meta/index.uuid": "bd98c1fc779c40cb",
    ".nv-meta/split.yaml": "af17d213ca390955",
    "_packing/plan/pack_offsets.npy": "987f7ffca1011253",
    "_packing/plan/sample_ids.npy": "b3c1086c254557c6",
    "_packing/plan/set_aside_ids.npy": "e734dac55ea9fbbe",
    "_packing/plan/set_aside_reasons.npy": "4ca930d4c39dd441",
    "train-000000.tar": "7d1567ef18706a6f",
    "train-000000.tar.idx": "eccb0a4a1a2183b4",
    "train-000001.tar": "c769748b5123e29c",
    "train-000001.tar.idx": "e408e726d438517e",
    "val-000000.tar": "e376605bea360925",
    "val-000000.tar.idx": "d2bd358ac2e8c451",
}


def png(width: int, height: int) -> bytes:
    """A grey picture whose bytes depend on no version of an encoder."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = b"".join(b"\0" + bytes((x * y) % 251 for x in range(width)) for y in range(height))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_source(root: Path) -> None:
    root.mkdir()
    for i in range(24):
        caption = " ".join(f"word{i * j % 17}" for j in range(2 + i * 7 % 40))
        (root / f"{i:03d}.png").write_bytes(png(28 * (2 + i % 5), 28 * (2 + i % 3)))
        (root / f"{i:03d}.json").write_text(json.dumps({"captions": [{"content": caption}]}))
    (root / "023.json").write_text("{")


def digests(root: Path) -> dict[str, str]:
    patterns = ("*.tar", "*.tar.idx", "_packing/plan/*.npy", ".nv-meta/*.yaml", ".nv-meta/*.uuid")
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in paths
    }


def test_bytes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path is part of the manifest, whose hash is the dataset's uuid
    write_source(Path("data"))
    output = {"key_prefix": "", "packs_per_shard": 4, "split": {"train": 0.8, "val": 0.2}}
    run = packed_run(Path("data"), Path("out"), pack={"seq_length": 192}, output=output)
    assert digests(Path("out")) == GOLDEN
    assert verify(run, deep=True).ok


def test_a_default_and_its_value_written_out_are_the_same(tmp_path: Path) -> None:
    """Or an output could not be used any more once a configuration says what was the default."""
    default = make_run(tmp_path / "data", tmp_path / "out")
    options = default.config.model
    written = {"max_aspect_ratio": options.max_aspect_ratio, "video_fps": options.video_fps}
    same = make_run(tmp_path / "data", tmp_path / "out", model=written)
    expected = config_fingerprint(default.config)
    open_encoder.cache_clear()  # 200 and 200.0 are one key of it
    assert config_fingerprint(same.config) == expected
