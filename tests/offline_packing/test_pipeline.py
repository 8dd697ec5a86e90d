"""The whole mode on real files: determinism, bytes that stay, resuming, refusing what changed."""

import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from offline_packing.engines.local import LocalEngine
from offline_packing.errors import ConfigError, StageError
from offline_packing.measure import measure as measure_module
from offline_packing.measure.measure import measure
from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.runs.run import Run, open_encoder
from offline_packing.verify.verify import verify
from offline_packing.write import write as write_module
from tests.helpers.datasets import (
    captioning_pairs,
    index_rows,
    make_run,
    mixed_pairs,
    pack_all,
    packed_run,
    plan_index,
    plan_summary,
    write_planned,
)
from tests.helpers.faults import killing
from tests.helpers.outputs import shard_files


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_rotated_images_are_measured_as_they_are_seen(tmp_path: Path, image_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (280, 84)).save(buffer, image_format, exif=exif)
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.json").write_text('{"caption": "A strip."}')
    (root / f"a.{image_format.lower()}").write_bytes(buffer.getvalue())
    run = packed_run(root, tmp_path / "out")
    assert index_rows(run)[0]["grid_thw"] == [1, 20, 6]  # upright
    assert verify(run, deep=True).ok


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dialogues, and two records that are set aside."""
    root = mixed_pairs(tmp_path_factory.mktemp("mixed"))
    for name in ("0000.broken", "zz"):
        (root / f"{name}.json").write_text("{")
    return root


def test_complete_stages_are_not_done_again(
    captions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = packed_run(captions, tmp_path / "out")
    before = shard_files(run)
    for module, name in ((measure_module, "measure_part"), (write_module, "write_shard")):
        monkeypatch.setattr(module, name, killing(lambda task: task, 0))
    pack_all(run)
    assert shard_files(run) == before


def test_changed_model_is_refused_by_name(captions: Path, tmp_path: Path) -> None:
    pack_all(make_run(captions, tmp_path / "out"))
    changed = {"model": {"max_pixels": 28 * 28 * 32}}
    run = make_run(captions, tmp_path / "out", **changed)
    for verb in (measure, plan_index, write_planned, verify):
        with pytest.raises(StageError, match=r"model\.max_pixels was 50176, is 25088"):
            verb(run)
    another = make_run(captions, tmp_path / "out", model={"family": "qwen2_5_vl"})
    was, now = (
        f"the tokenizer of model.family={name} and model.processor=builtin"
        for name in ("qwen2_vl", "qwen2_5_vl")
    )
    for verb in (measure, plan_index, verify):
        with pytest.raises(StageError, match=f"model.tokenizer was {was}, is {now}; "):
            verb(another)
    accepting = Run(run.config, LocalEngine(0), frozenset({"model.max_pixels"}))
    pack_all(accepting)
    assert not verify(accepting, deep=True).ok  # larger pictures now encode to fewer tokens
    with pytest.raises(ConfigError, match=r"model\.maxpixels: no such field; valid: model\."):
        measure(Run(run.config, LocalEngine(0), frozenset({"model.maxpixels"})))
    overwriting = packed_run(captions, tmp_path / "out", output={"overwrite": True}, **changed)
    assert verify(overwriting).ok


def test_changed_source_is_refused_by_name(tmp_path: Path) -> None:
    root = captioning_pairs(tmp_path / "data", 8)
    run = make_run(root, tmp_path / "out", engine={"samples_per_part": 2})
    measure(run)
    (root / "part0" / "000000.json").write_text('{"caption": "another length"}')
    (root / "part0" / "000002.json").unlink()
    for i in range(4):
        (root / "part1" / f"new{i}.jpg").write_bytes(b"")
    changes = (
        r"source\.0\.listing: the files of .*/data changed: 4 added \('part1/new0\.jpg', "
        r"'part1/new1\.jpg', 'part1/new2\.jpg', …\), 1 removed \('part0/000002\.json'\), "
        r"1 of another size \('part0/000000\.json'\); set output\.overwrite"
    )
    with pytest.raises(StageError, match=changes):
        measure(run)
    run.workspace.index_info.unlink()  # as if the run had been killed
    with pytest.raises(StageError, match=r"unfinished index .* source\.0\.listing"):
        measure(run)


def test_plans_are_free_until_shards_are_written(captions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    measure(make_run(captions, out))
    texts = {n: plan_summary(make_run(captions, out, pack={"seq_length": n})) for n in (256, 512)}
    assert "of 256 tokens" in texts[256]
    assert "of 512 tokens" in texts[512]
    with pytest.raises(StageError, match=r"pack\.seq_length was 512, is 256"):
        write_planned(make_run(captions, out, pack={"seq_length": 256}))
    write_planned(make_run(captions, out))
    with pytest.raises(StageError, match=r"pack\.seq_length was 512, is 256"):
        plan_index(make_run(captions, out, pack={"seq_length": 256}))
    with pytest.raises(StageError, match=r"output\.packs_per_shard was 2, is 4"):
        write_planned(make_run(captions, out, output={"packs_per_shard": 4}))
    other = packed_run(
        captions, out, output={"packs_per_shard": 4, "overwrite": True}, pack={"seq_length": 256}
    )
    assert verify(other).ok
    assert other.workspace.manifest.exists()


def test_on_overlong_error_names_the_sample(captions: Path, tmp_path: Path) -> None:
    run = make_run(captions, tmp_path / "out", pack={"seq_length": 60, "on_overlong": "error"})
    measure(run)
    with pytest.raises(StageError, match=r"sample 'part\S+' has \d+ tokens > seq_length 60 .*set_"):
        plan_index(run)


def test_foreign_folder_is_left_alone(captions: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    run = make_run(captions, tmp_path)
    message = "is not empty and does not hold an earlier run"
    with pytest.raises(StageError, match=message), run.workspace.lock():
        pytest.fail("the folder was taken")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_max_shard_bytes(captions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = {"packs_per_shard": 1000, "max_shard_bytes": 80_000}
    run = make_run(captions, tmp_path / "out", output=output)
    sizes = [shard.bytes for shard in pack_all(run).shards]
    assert len(sizes) > 1
    assert 40_000 < max(sizes) <= 80_000
    assert "hold one pack" not in caplog.text
    small = make_run(captions, tmp_path / "small", output={"max_shard_bytes": 1})
    assert [shard.packs for shard in pack_all(small).shards] == [1] * 5
    assert "5 of 5 shards hold one pack: output.max_shard_bytes 1 is in bytes" in caplog.text


#: sha256, first 16 digits. What depends on versions of libraries is left out.
GOLDEN = {
    ".nv-meta/dataset.yaml": "b274b7e830ff943e",
    ".nv-meta/index.uuid": "2190fa6ae06f59cb",
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
