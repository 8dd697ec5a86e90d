"""NeVA's command: the flags mean what they mean there, and the printed command line runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click import ClickException
from click.testing import CliRunner
from transformers import AutoTokenizer

from examples.neva.preprocess_dataset import (
    configuration,
    main,
    prepare_tokenizer,
    save_configuration,
)
from examples.neva.train import translate
from offline_packing.config.packing import load_config
from offline_packing.engines.local import LocalEngine
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import image_bytes, write_json
from tests.helpers.pages import blocks
from tests.helpers.texts_and_images import random_text
from tests.helpers.tiny_tokenizers import save_llama_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming_from_neva.md").read_text()
FLAGS = {
    **dict.fromkeys(("--data_path", "--image_folder", "--tokenizer_path", "--output_dir")),
    "--max_seq_length": 4096,
    "--packing_algorithm": "first_fit_shuffle",
    "--hf_vision_encoder": "openai/clip-vit-large-patch14-336",
    "--conv_template": "plain",
    "--image_aspect_ratio": "square",
    "--seed": 0,
    "--hparams_file": None,
}


def llava_json(path: Path, images: Path, count: int = 30) -> None:
    """Records as LLaVA's, of one image each and some of none."""
    records: list[dict[str, Any]] = []
    images.mkdir(parents=True)
    for i in range(count):
        question = (f"<image>\nWhat is {i}?", f"What is {i}?\n<image>", f"Why {i}?")[i % 3]
        texts = [question, "It is. " * (1 + i), "And?", "So."][: 2 + 2 * (i % 2)]
        turns = [{"from": ("human", "gpt")[j % 2], "value": text} for j, text in enumerate(texts)]
        records.append({"id": f"r{i}", "conversations": turns})
        if "<image>" in question:
            records[-1]["image"] = f"coco/{i}.jpg"
            (images / "coco").mkdir(exist_ok=True)
            (images / f"coco/{i}.jpg").write_bytes(image_bytes(40 + i, 60))
    write_json(path, records)


def sentencepiece_model(path: Path, **changes: Any) -> None:
    """Built as LLaMA's with NeVA's special tokens, but for `changes` of the trainer's options."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 30, chinese=i % 3 == 0).replace("\n", " ") for i in range(200)]
    path.parent.mkdir(parents=True)
    options = {
        "vocab_size": 700,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "user_defined_symbols": [f"<extra_id_{i}>" for i in range(8)],
        "minloglevel": 2,
    }
    prefix = str(path.with_suffix(""))
    trainer.train(sentence_iterator=iter(texts), model_prefix=prefix, **{**options, **changes})


def test_the_flags_and_their_defaults() -> None:
    options = {option.opts[0]: option for option in main.params}
    assert list(options) == list(FLAGS)
    for name, default in FLAGS.items():
        assert options[name].to_info_dict()["default"] == default, name
        assert f"`{name}`" in PAGE, name


@pytest.mark.exhaustive
def test_the_command_line_of_the_document_runs(tmp_path: Path) -> None:
    printed = next(block.text for block in blocks(PAGE) if "preprocess_dataset.py" in block.text)
    assert printed.count("--") == 10
    root = tmp_path / "LLaVA-Instruct-150K"
    llava_json(root / "llava_v1_5_mix665k_filtered.json", root / "images")
    sentencepiece_model(tmp_path / "checkpoints/tokenizer_add_special.model")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", printed.replace("/path/to", str(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = root / "packed_seq_12288_336_v1"
    run = Run(load_config(output / "pack.yaml", ["engine.workers=0"]), LocalEngine(0))
    assert run.config.model.template == "neva"
    assert (run.config.pack.seq_length, run.config.pack.seed) == (12288, 42)
    assert verify(run, deep=True).num_samples == 30
    options = done.stdout.splitlines()[-1].split()
    assert translate(options) == [f"data.path={output}/packs"]
    with pytest.raises(ClickException, match=r"packs hold images of \[336,336\]; set it"):
        translate([*options, "model.data.crop_size=[224,224]"])
    counts = json.loads(run.workspace.manifest.read_text())["counts"]
    per_pack = 30 / counts["packs"]["train"]
    assert f"global_batch_size=<GBS / {per_pack:.3f}>" in done.stdout


def test_a_converted_tokenizer_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    path = tmp_path / "model/tokenizer.model"
    sentencepiece_model(path)
    theirs = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path))
    folder = prepare_tokenizer(str(path), tmp_path / "tokenizer")
    ours = AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(1)
    for i in range(500):
        text = random_text(rng, 20, chinese=i % 3 == 0)
        text = " " * (i % 4 == 0) + text
        assert ours(text, add_special_tokens=False)["input_ids"] == theirs.encode(text)
    assert ours.convert_tokens_to_ids("<image>") == theirs.get_piece_size()
    assert prepare_tokenizer(folder, tmp_path / "again") == folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, r"normalizer_spec\.name=nmt_nfkc: only identity"),
        ({"remove_extra_whitespaces": True}, r"remove_extra_whitespaces=True: only False"),
        ({"add_dummy_prefix": False}, r"add_dummy_prefix=False: only True"),
        ({"byte_fallback": False}, r"byte_fallback=False: only True"),
        ({"model_type": "unigram", "vocab_size": 450}, r"model_type=1: only 2"),
    ],
)
def test_a_model_whose_ids_a_conversion_would_change_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = tmp_path / "model/tokenizer.model"
    sentencepiece_model(path, **changes)
    with pytest.raises(ClickException, match=f"{path} cannot be used: .*{told}.*give a checkpoint"):
        prepare_tokenizer(str(path), tmp_path / "tokenizer")
    assert not (tmp_path / "tokenizer").exists()
    path.write_bytes(b"\x0a\xff")
    with pytest.raises(ClickException, match=f"{path} cannot be used: it is not a Sentence"):
        prepare_tokenizer(str(path), tmp_path / "tokenizer")


def test_packs_of_half_the_data_are_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the records have more than one turn, which captions cannot hold. Paths are relative,
    and what is written holds elsewhere too."""
    monkeypatch.chdir(tmp_path)
    llava_json(tmp_path / "a.json", tmp_path / "images", 12)
    (tmp_path / "llama").mkdir()
    save_llama_tokenizer(tmp_path / "llama")
    flags = {"data_path": "a.json", "image_folder": "images", "tokenizer_path": "llama"}
    arguments = [f"--{name}={value}" for name, value in (flags | {"output_dir": "my out"}).items()]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "6 of 12 samples (50.0%) are set aside, more than" in result.output
    assert "to go on with other settings: offline-packing run" in result.output
    assert not (tmp_path / "my out/packs/manifest.json").exists()
    config = load_config(tmp_path / "my out/pack.yaml").model_dump()
    paths = [config["source"][0][name] for name in ("path", "image_root")]
    paths += [config["output"]["path"], config["model"]["processor"]]
    parts = [Path(path).relative_to(tmp_path).parts[0] for path in paths]
    assert parts == ["a.json", "images", "my out", "llama"]


def test_the_configuration_of_complete_packs_stays(tmp_path: Path) -> None:
    path = tmp_path / "pack.yaml"
    save_configuration(given(seed=1), path)
    save_configuration(given(seed=2), path)
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs/manifest.json").write_text("{}")
    save_configuration(given(seed=2), path)
    with pytest.raises(ClickException, match=r"was packed with pack\.seed=2, and .* now mean 3"):
        save_configuration(given(seed=3), path)
    assert yaml.safe_load(path.read_text())["pack"]["seed"] == 2


def given(**changes: Any) -> dict[str, Any]:
    flags = {name.removeprefix("--"): value for name, value in FLAGS.items()}
    del flags["tokenizer_path"]
    fixed = {"output_dir": Path("out"), "data_path": "a.json"}
    return configuration(**{**flags, **fixed, **changes})


def test_vision_encoders(tmp_path: Path) -> None:
    model = given(hf_vision_encoder="google/siglip-so400m-patch14-384")["model"]
    assert (model["tower"], model["image_size"], model["patch_size"]) == ("siglip", 384, 14)
    assert given(hf_vision_encoder="openai/clip-vit-large-patch14")["model"]["image_size"] == 224
    write_json(tmp_path / "config.json", {"vision_config": {"patch_size": 16, "image_size": 256}})
    assert given(hf_vision_encoder=str(tmp_path))["model"]["patch_size"] == 16
    write_json(tmp_path / "config.json", {"vision_config": {}})
    with pytest.raises(ClickException, match=r"config\.json names no patch_size and image_size"):
        given(hf_vision_encoder=str(tmp_path))


CROPPED = "model: {{mm_cfg: {{vision_encoder: {{crop_size: {}}}}}}}"


@pytest.mark.parametrize(
    ("changes", "hparams", "message"),
    [
        ({"image_folder": "a.tar"}, "", "is a tar; unpack it"),
        ({"hf_vision_encoder": "mine"}, "", "does not end in patchN"),
        ({}, "model: {mm_cfg: {use_im_start_end: true}}", "only False is supported"),
        ({}, "model: {data: {media_type: video}}", "only image is supported"),
        ({}, CROPPED.format(336), "crop_size 336 is not that of"),
        ({}, CROPPED.format([224, 224]), r"\[224, 224\] is not that of openai/clip-vit-large-pat"),
        ({}, "a: [1\n", r"--hparams_file .*llava_config\.yaml"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], hparams: str, message: str
) -> None:
    path = tmp_path / "llava_config.yaml"
    path.write_text(hparams or "{}")
    with pytest.raises(Exception, match=message):
        given(**changes, hparams_file=path)


def test_fields_of_the_yaml(tmp_path: Path) -> None:
    path = tmp_path / "llava_config.yaml"
    adapter = {"model": {"mm_cfg": {"mm_mlp_adapter_type": "mlp_downsample"}}}
    path.write_text(yaml.safe_dump(adapter))
    assert given(hparams_file=path)["model"]["tokens_per_image"] == 144
    fields = re.findall(r"`(model\.[a-z_.]+)[:`]", PAGE)
    assert {"model.mm_cfg.mm_mlp_adapter_type", "model.data.sep_image_conv_front"} <= set(fields)


def test_options_of_training() -> None:
    given = "sft.yaml ++model.data.packed_sequence=True model.global_batch_size=4 a.b=c "
    given += "model.micro_batch_size=2 model.data.data_prefix=out/p"
    expected = "sft.yaml a.b=c batch.global_batch_packs=4 data.micro_batch_size=2 "
    expected += "data.path=out/packs batch.global_batch_size=null"
    assert translate(given.split()) == expected.split()
    with pytest.raises(ClickException, match="packed_sequence=False: only packs are trained"):
        translate(["++model.data.packed_sequence=False"])
