"""The pages for those who come from another packer, followed from their own files to a first step:
what packs is run, a framework's command checked as far as its arguments. `tests/peers/` gives these
to the frameworks themselves."""

import itertools
import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from megatron.energon.cli.main import main as energon
from transformers import AutoModelForImageTextToText

from launch.data.packed_data import read_packed_data
from offline_packing.runs.run import open_encoder
from task_encoders.packed_task_encoder import PackedTaskEncoder
from task_encoders.text.tokenizer import checkpoint_tokenizer, load_tokenizer
from tests.helpers.command import invoke
from tests.helpers.datasets import image_bytes
from tests.helpers.energon_batches import check_training_step
from tests.helpers.formats import lines, tar_bytes, write_file
from tests.helpers.pages import blocks
from tests.helpers.peers import small_checkpoint

ROOT = Path(__file__).parents[1]


def ms_swift_file() -> None:
    """ms-swift's standard form with absolute paths, beside its others."""
    for i in range(3):
        write_file(Path(f"images/{i}.jpg"), image_bytes(56 + 28 * i, 84))
    page = (ROOT / "docs/coming_from_ms_swift.md").read_text()
    (shown,) = [json.loads(block.text) for block in blocks(page) if block.language == "json"]
    said = shown["messages"]
    records = [{**shown, "images": [str(Path(f"images/{i % 3}.jpg").resolve())]} for i in range(9)]
    records += [{"system": "S.", "query": "Q?", "response": "R.", "history": [["a", "b"]]}]
    records += [{"messages": [said[0] | {"content": "Q?"}, said[1] | {"loss": False}, *TWO_TURNS]}]
    write_file(Path("train.jsonl"), lines(records))


TWO_TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def bridge_folder() -> None:
    """The folder of Megatron-Bridge's tutorial (tutorials/data/energon/README.md)."""
    asked = [{"type": "image"}, {"type": "text", "text": "What is the dominant color?"}]
    said = [{"type": "text", "text": "The image is red."}]
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    for split in ("train", "val"):
        members = [
            member
            for i in range(11)
            for member in (
                (f"{split}-{i:06}.image.png", image_bytes(56 + 28 * (i % 3), 84, "PNG")),
                (f"{split}-{i:06}.conversation.json", json.dumps(talk).encode()),
            )
        ]
        write_file(Path(f"data/energon/{split}-shard-000000.tar"), tar_bytes(members))
    loader = (
        "__module__: megatron.bridge.data.energon.task_encoder_utils\n__class__: ChatMLWebdataset\n"
        "field_map:\n  imgs: image.png\n  conversation: conversation.json\nsubflavors: {}\n"
    )
    splits = "split_parts: {train: [train-shard-000000.tar], val: [val-shard-000000.tar]}\n"
    write_file(Path("data/energon/.nv-meta/dataset.yaml"), loader.encode())
    write_file(Path("data/energon/.nv-meta/split.yaml"), splits.encode())


def aiak_folder() -> None:
    """Write pairs as AIAK-Megatron's steps take them, some without a picture."""
    for i in range(8):
        texts = [
            {"role": "user", "content": "<image>\nWhat?"},
            {"role": "assistant", "content": "It."},
        ]
        write_file(Path(f"sft_data/{i:012}.jpg"), image_bytes(56 + 28 * (i % 3), 84))
        record = {"messages": texts + TWO_TURNS * (i % 2), "images": [f"{i:012}.jpg"]}
        write_file(Path(f"sft_data/{i:012}.json"), json.dumps(record).encode())
    for i in range(3):
        record = {"messages": TWO_TURNS, "images": []}
        write_file(Path(f"sft_data/output_{i:08}.json"), json.dumps(record).encode())


#: By page: writes their files, and the model that they train.
PAGES: dict[str, tuple[Callable[[], None], str]] = {
    "ms_swift": (ms_swift_file, "Qwen/Qwen2-VL-2B-Instruct"),
    "megatron_bridge": (bridge_folder, "Qwen/Qwen2.5-VL-7B-Instruct"),
    "llava_onevision": (aiak_folder, "Qwen/Qwen2-VL-2B-Instruct"),
}


def packs_of(words: list[str], model: str) -> Path:
    """Check the files of ours that a command of training names; return its packs."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    if words[0] == "swift":  # reads packs as they are
        given = dict(itertools.pairwise(words))
        assert (given["--packing"], given["--train_dataloader_shuffle"]) == ("true", "false")
    values = [word.rpartition("=")[2] for word in words]
    assert all((ROOT / value).is_file() for value in values if value.endswith((".py", ".sh")))
    assert [value for value in values if Path(value, "config.json").is_file()] in ([model], [])
    (packs,) = [Path(value) for value in values if Path(value, "manifest.json").is_file()]
    return packs


@pytest.fixture(autouse=True)
def own_checkpoints() -> Iterator[None]:
    """Empty the caches of tokenizers and encoders: other tests have another checkpoint of the same
    relative name."""
    caches = (checkpoint_tokenizer, load_tokenizer, open_encoder)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_from_their_files_to_a_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, model = PAGES[name]
    monkeypatch.chdir(tmp_path)
    write()
    family = "qwen2_5_vl" if "2.5" in model else "qwen2_vl"
    checkpoint = small_checkpoint(family, tmp_path / model)
    page = (ROOT / f"docs/coming_from_{name}.md").read_text()
    packing, training = [block for block in blocks(page) if block.language == "bash"]
    for line in packing.text.replace("\\\n", " ").splitlines():
        command, *arguments = shlex.split(line, comments=True)
        if command == "energon":
            shown = CliRunner().invoke(energon, arguments, catch_exceptions=False)
            assert shown.exit_code == 0, shown.output
            continue
        if command == "sed":
            subprocess.run([command, *arguments], check=True)
            continue
        assert command == "offline-packing"
        in_process = ["engine.workers=0"] if arguments[0] == "run" else []
        said = invoke(*arguments, *in_process).output
        assert "REFUSED" not in said
    assert "11 samples = 11 packed + 0 set aside" in invoke("report", "pack.yaml").output
    (line,) = training.text.replace("\\\n", " ").splitlines()
    words = shlex.split(line)
    variables = dict(word.split("=") for word in words if word.startswith("OFFLINE_"))
    packs = packs_of(words[len(variables) :], model)
    data = read_packed_data(packs)
    assert (data.model.family, data.tasks) == (family, ("bmr",))
    expected = (4014080, 8192) if name == "llava_onevision" else (1003520, 4096)
    assert (data.model.max_pixels, data.seq_length) == expected
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    encoder = PackedTaskEncoder(seq_length=data.seq_length, model=data.model)
    loaded = AutoModelForImageTextToText.from_pretrained(checkpoint)
    check_training_step(loaded, packs, encoder)
