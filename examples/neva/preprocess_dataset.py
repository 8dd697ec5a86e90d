"""NeVA's `preprocess_dataset.py`: its eleven flags, in front of measure, plan, write and export.

    python examples/neva/preprocess_dataset.py --data_path=llava.json --image_folder=images \\
        --tokenizer_path=tokenizer.model --output_dir=out/packed_seq_12288_336_v1 --conv_template=v1

It writes OUTPUT_DIR/pack.yaml and the tokenizer as a folder, packs into OUTPUT_DIR/packs, which
train.py trains, and exports them as OUTPUT_DIR/packed_seq_dataset.bin and .idx. Any verb of
offline-packing takes pack.yaml. Run it again after a kill. Its flags are explained in
docs/coming_from_neva.md.
"""

import json
import operator
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import yaml

from offline_packing.cli.main import main as offline_packing
from offline_packing.export.nemo import PREFIX
from offline_packing.storage.files import write_atomically

#: Patch and image size at the end of a vision encoder's name; 224 pixels where it names none.
_SIZES: Final = re.compile(r"patch(\d+)(?:-(\d+))?$")
#: Fields of NeVA's YAML that would change samples, and the values that are supported.
_SUPPORTED: Final[Mapping[str, Any]] = {
    "model.data.is_multimodal": True,
    "model.data.media_type": "image",
    "model.data.sep_image_conv_front": False,
    "model.mm_cfg.use_im_start_end": False,
}
#: Fields of a SentencePiece model that decide its ids, and LLaMA's values, which can be converted.
_LLAMA_MODEL: Final[Mapping[str, Any]] = {
    "trainer_spec.model_type": 2,  # BPE
    "trainer_spec.byte_fallback": True,
    "trainer_spec.treat_whitespace_as_suffix": False,
    "normalizer_spec.precompiled_charsmap": b"",  # normalization_rule_name=identity
    "normalizer_spec.remove_extra_whitespaces": False,
    "normalizer_spec.add_dummy_prefix": True,
    "normalizer_spec.escape_whitespaces": True,
}
#: `model.template` by --conv_template.
_TEMPLATES: Final = {"plain": "plain", "v1": "neva"}


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@click.option("--data_path", required=True, help="Dataset: a JSON array, or JSON Lines.")
@click.option("--image_folder", help="Folder that images are named in; default: the dataset's.")
@click.option(
    "--tokenizer_path", required=True, help="SentencePiece .model, checkpoint folder or hub name."
)
@click.option("--output_dir", required=True, type=click.Path(path_type=Path))
@click.option("--max_seq_length", default=4096, help="Tokens of a pack.")
@click.option(
    "--packing_algorithm",
    default="first_fit_shuffle",
    type=click.Choice(["first_fit_decreasing", "first_fit_shuffle", "shuffle_and_pack"]),
)
@click.option("--hf_vision_encoder", default="openai/clip-vit-large-patch14-336")
@click.option("--conv_template", default="plain", type=click.Choice(list(_TEMPLATES)))
@click.option("--image_aspect_ratio", default="square", type=click.Choice(["square", "pad"]))
@click.option("--seed", default=0, help="Of the shuffle.")
@click.option(
    "--hparams_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="NeVA's YAML; read are patch_dim, crop_size and mm_mlp_adapter_type.",
)
def main(output_dir: Path, tokenizer_path: str, **flags: Any) -> None:
    """Pack a dataset in LLaVA's form as NeVA does: OUTPUT_DIR/packed_seq_dataset.bin and .idx."""
    config = configuration(output_dir, **flags)
    check_folder(output_dir)
    packs, exported = output_dir / "packs", output_dir / "nemo"
    (packs / "_packing").mkdir(parents=True, exist_ok=True)  # marks the folder as our own
    config["model"]["processor"] = prepare_tokenizer(tokenizer_path, output_dir / "tokenizer")
    path = output_dir / "pack.yaml"
    save_configuration(config, path)
    verbs = [[verb, str(path)] for verb in ("measure", "plan", "write")]
    for verb in (*verbs, ["export", str(packs), str(exported), "--to=nemo"]):
        try:
            offline_packing(verb)
        except SystemExit:
            click.echo(
                f"to go on with other settings: offline-packing run {shlex.quote(str(path))} "
                "key.sub=value",
                err=True,
            )
            raise
    for file in exported.glob("*.*"):
        link = output_dir / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.relative_to(output_dir))
    click.echo(how_to_train(output_dir, config["model"]["image_size"]))


def configuration(
    output_dir: Path,
    *,
    data_path: str,
    image_folder: str | None,
    max_seq_length: int,
    packing_algorithm: str,
    hf_vision_encoder: str,
    conv_template: str,
    image_aspect_ratio: str,
    seed: int,
    hparams_file: Path | None,
) -> dict[str, Any]:
    """The configuration of offline-packing for these flags, without the tokenizer. Raises
    click.ClickException for unsupported values."""
    if image_folder is not None and image_folder.endswith(".tar"):
        raise click.ClickException(f"--image_folder {image_folder} is a tar; unpack it")
    try:
        hparams = {} if hparams_file is None else yaml.safe_load(hparams_file.read_text())
    except yaml.YAMLError as error:
        raise click.ClickException(f"--hparams_file {hparams_file}: {error}") from error
    is_plain = conv_template == "plain"
    return {
        "source": {
            "format": "jsonl" if data_path.endswith(".jsonl") else "json",
            "path": absolute(data_path),
            "task": "captioning" if is_plain else "bmr",
            "ignore_prompts": is_plain,
            **({} if image_folder is None else {"image_root": absolute(image_folder)}),
        },
        "model": {
            "family": "llava_1_5",
            "template": _TEMPLATES[conv_template],
            "image_aspect": image_aspect_ratio,
            **vision_options(hf_vision_encoder, hparams),
        },
        "pack": {
            "seq_length": max_seq_length,
            "strategy": packing_algorithm,
            "seed": seed,
        },
        "output": {"path": absolute(str(output_dir / "packs")), "media": "refer"},
    }


def check_folder(output_dir: Path) -> None:
    """Raise click.ClickException if there is something else in the folder."""
    is_own = not output_dir.exists() or (output_dir / "packs" / "_packing").is_dir()
    if not is_own and any(output_dir.iterdir()):
        raise click.ClickException(
            f"--output_dir {output_dir} is not empty and holds no earlier run; choose another"
        )


def save_configuration(config: Mapping[str, Any], path: Path) -> None:
    """Write pack.yaml. Raises click.ClickException if complete packs have other settings."""
    if path.exists() and (path.parent / "packs" / "manifest.json").exists():
        before = yaml.safe_load(path.read_text())
        fields = {
            f"{part}.{name}" for one in (before, config) for part in one for name in one[part]
        }
        for field in sorted(fields):
            was, now = follow(before, field, None), follow(config, field, None)
            if was != now:
                raise click.ClickException(
                    f"{path.parent} was packed with {field}={was}, and the flags now mean {now}; "
                    "choose another --output_dir, or remove this one"
                )
    write_atomically(path, yaml.safe_dump(config, sort_keys=False).encode())


def absolute(path: str) -> str:
    """Absolute form of a local path, so that pack.yaml means the same in any folder."""
    return path if "://" in path else os.path.abspath(path)


def vision_options(encoder: str, hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Options of llava_1_5 for a vision encoder, by its config.json or its name, and NeVA's YAML.
    Raises click.ClickException for unsupported values."""
    for field, value in _SUPPORTED.items():
        if (given := follow(hparams, field, value)) != value:
            raise click.ClickException(
                f"--hparams_file: {field}={given}: only {value} is supported"
            )
    patch, side = sizes_of(encoder)
    patch = follow(hparams, "model.mm_cfg.vision_encoder.patch_dim", patch)
    crop = follow(hparams, "model.mm_cfg.vision_encoder.crop_size", [side, side])
    if crop != [side, side]:
        raise click.ClickException(
            f"--hparams_file: crop_size {crop} is not that of {encoder}, [{side}, {side}]; "
            "name the encoder that is trained"
        )
    tower = "siglip" if "siglip" in encoder.lower() else "clip"
    options = {"tower": tower, "image_size": side, "patch_size": patch}
    if follow(hparams, "model.mm_cfg.mm_mlp_adapter_type", "") == "mlp_downsample":
        options["tokens_per_image"] = (-(-(side // patch) // 2)) ** 2  # 2 x 2 patches a token
    return options


def sizes_of(encoder: str) -> tuple[int, int]:
    """Patch and image size in pixels."""
    file = Path(encoder) / "config.json"
    if file.is_file():
        content = json.loads(file.read_text())
        vision = content.get("vision_config", content)
        if not {"patch_size", "image_size"} <= vision.keys():
            raise click.ClickException(f"{file} names no patch_size and image_size")
        return vision["patch_size"], vision["image_size"]
    match = _SIZES.search(encoder)
    if match is None:
        raise click.ClickException(
            f"--hf_vision_encoder {encoder} does not end in patchN or patchN-SIZE; name a folder "
            "that holds its config.json"
        )
    return int(match[1]), int(match[2] or 224)


def follow(content: Any, field: str, default: Any) -> Any:
    """content["a"]["b"] for "a.b"; the default where it is missing."""
    for name in field.split("."):
        content = content.get(name) if isinstance(content, Mapping) else None
    return default if content is None else content


def prepare_tokenizer(path: str, folder: Path) -> str:
    """A folder or name of the tokenizer with a token for images: the one given, or `folder` with
    the SentencePiece model converted or the token added. Raises click.ClickException."""
    from transformers import AutoTokenizer

    try:
        if path.endswith(".model"):
            tokenizer = convert_sentencepiece(path)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path)
            if "<image>" in tokenizer.get_vocab():
                return absolute(path) if Path(path).is_dir() else path
    except (ImportError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise click.ClickException(
            f"--tokenizer_path {path} cannot be used: {text}"
            + "; pip install sentencepiece protobuf" * isinstance(error, ImportError)
        ) from error
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return absolute(str(folder))  # training may begin elsewhere


def convert_sentencepiece(path: str) -> Any:
    """LLaMA's kind of tokenizer, with the ids of the model; a blank goes in front of every text.
    Raises ValueError where transformers' tokenizer would give other ids."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import normalizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(Path(path).read_bytes())
    except DecodeError as error:
        raise ValueError("it is not a SentencePiece model, or damaged; copy it again") from error
    for field, value in _LLAMA_MODEL.items():
        if (given := operator.attrgetter(field)(proto)) != value:
            if isinstance(given, bytes):
                field, given, value = "normalizer_spec.name", proto.normalizer_spec.name, "identity"
            raise ValueError(
                f"{field}={given}: only {value}, LLaMA's, keeps the ids of the model; give a "
                "checkpoint folder with its tokenizer.json"
            )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": True, **special}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, "tokenizer.model"))
        Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    # LlamaTokenizer's own (transformers 5.23) puts no blank in front of a text that begins with
    # one, which SentencePiece does.
    blanks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer, backend.pre_tokenizer = normalizers.Sequence(blanks), None
    # LlamaTokenizer itself forgets `legacy` when it is saved.
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def how_to_train(output_dir: Path, side: int) -> str:
    """The figures of the packs, and the arguments of training."""
    counts = json.loads((output_dir / "packs" / "manifest.json").read_text())["counts"]
    packs = sum(counts["packs"].values())
    per_pack = counts["packed"] / packs
    return (
        f"{packs:,} packs of {per_pack:.3f} samples and {counts['tokens'] / packs:,.1f} tokens: "
        f"micro_batch_size=1, global_batch_size=<GBS / {per_pack:.3f}>\n"
        f"++model.data.packed_sequence=True ++model.data.crop_size=[{side},{side}] "
        f"++model.data.data_prefix={shlex.quote(str(output_dir / PREFIX))}"
    )


if __name__ == "__main__":
    main()
