"""NeVA's options of packed data in front of `launch.train_transformers`: those that begin with
model.data, and the two batch sizes. Any other argument is passed on. Trained are the packs beside
the files of the prefix.

    OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_BMR=1 python examples/neva/train.py launch/sft.yaml \\
        ++model.data.packed_sequence=True ++model.data.crop_size=[336,336] \\
        ++model.data.data_prefix=packed_seq_12288_336_v1/packed_seq_dataset \\
        model.family=llava_1_5 model.checkpoint=checkpoints/llava-1.5-7b-hf output.path=out/llava
"""

import json
import sys
from collections.abc import Sequence

import click

from launch.data.packed_data import read_packed_data
from launch.train_transformers import main
from task_encoders.storage.paths import path_of


def translate(arguments: Sequence[str]) -> list[str]:
    """The arguments of `launch.train_transformers` that these mean. Raises click.ClickException
    where they contradict the packs."""
    given = dict(one.removeprefix("++").partition("=")[::2] for one in arguments if "=" in one)
    prefix, crop_size = given.get("model.data.data_prefix"), given.get("model.data.crop_size")
    if (packed := given.get("model.data.packed_sequence", "True")) not in ("True", "true"):
        raise click.ClickException(f"packed_sequence={packed}: only packs are trained; set True")
    packs = str(path_of(prefix).parent / "packs") if prefix else ""
    if packs and crop_size is not None:
        side = read_packed_data(packs).model.model_dump().get("image_size")
        if json.loads(crop_size) != [side, side]:
            raise click.ClickException(
                f"crop_size={crop_size}: the packs hold images of [{side},{side}]; set it"
            )
    names = {
        "model.micro_batch_size": "data.micro_batch_size",
        "model.global_batch_size": "batch.global_batch_packs",
    }
    ours = [f"{names[name]}={value}" for name, value in given.items() if name in names]
    ours += [f"data.path={packs}"] if packs else []
    if "model.global_batch_size" in given:
        ours.append("batch.global_batch_size=null")
    own = ("data_prefix", "packed_sequence", "crop_size")
    theirs = (*names, *(f"model.data.{name}" for name in own))
    rest = [one for one in arguments if one.removeprefix("++").partition("=")[0] not in theirs]
    return rest + ours


if __name__ == "__main__":
    try:
        translated = translate(sys.argv[1:])
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    main(translated)
