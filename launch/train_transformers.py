"""Train a model of any family that transformers has on packs:
`torchrun ... -m launch.train_transformers CONFIG.yaml [key.sub=value ...]`.

Loop, batches, optimizer, checkpoints and exit status are those of `launch.train`, and so is the
configuration, except for `model.lora`, `model.fsdp`, the names of `model.attention`, and
`parallel`, which must be 1.
"""

from functools import partial
from typing import Any

import click
from pydantic import model_validator

from launch import config as launch_config
from launch.model.config import TransformersModelConfig
from launch.train import ACCEPT, CONFIG, DEBUG, OVERRIDES, train


class TransformersConfig(launch_config.LaunchConfig):
    """Everything one training run through transformers is made from."""

    model: TransformersModelConfig = TransformersModelConfig()

    @model_validator(mode="after")
    def _check_parallel(self) -> "TransformersConfig":
        for name in ("tensor", "context"):
            if (size := getattr(self.parallel, name)) > 1:
                raise ValueError(
                    f"parallel.{name} {size}: only launch.train has it; set it to 1, and "
                    "model.fsdp=true for a model that one device does not hold"
                )
        return self


load_config = partial(launch_config.load_config, kind=TransformersConfig)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG
@OVERRIDES
@ACCEPT
@click.option("--lora", is_flag=True, help="Train adapters, as model.lora.rank=16 does.")
@DEBUG
def main(overrides: tuple[str, ...], lora: bool, **given: Any) -> None:
    """Train as CONFIG says; fields can be set on the command line, as data.path=out/packed."""
    own = ("model.lora={}",) if lora else ()
    train(load_config, overrides=(*own, *overrides), **given)


if __name__ == "__main__":
    main()
