"""Train on packs: `torchrun ... -m launch.train CONFIG.yaml [key.sub=value ...]`, the readable
reference on megatron-core's layers, exact and small. Production runs take the trainers of
docs/integrations.md.

Exit status: 0 done, 1 the run failed, 2 the command or the configuration is wrong, 143 or 130
stopped by SIGTERM or Ctrl-C after saving.
"""

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import click

from launch.config import LaunchConfig, load_config
from offline_packing.errors import ConfigError, DiskFullError, StageError
from task_encoders.versions import SUPPORTED, UnsupportedVersionError, require_supported

#: The exception after the last frame of a traceback.
_RAISED: Final = re.compile(r"^[\w.]+: (.*)", re.DOTALL | re.MULTILINE)
#: torch's text for a loader's process that died, which it raises at any place in the trainer.
_DEAD_WORKER: Final = re.compile(r"DataLoader worker \(pid.*|a loader worker exited unexpectedly.*")
#: Loggers of what all ranks find alike; outside of loaders, `rows` are of data measured first.
_ALIKE: Final = ("launch", "offline_packing", "task_encoders.loading", "task_encoders.rows")

#: Parameters of this command, and of `launch.train_transformers`.
CONFIG: Final = click.argument("config", type=click.Path(dir_okay=False))
OVERRIDES: Final = click.argument("overrides", nargs=-1, metavar="[KEY.SUB=VALUE]...")
ACCEPT: Final = click.option(
    "--accept-mismatch",
    multiple=True,
    metavar="FIELD",
    help="Resume although this field, as an error message named it, differs now.",
)
DEBUG: Final = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG
@OVERRIDES
@ACCEPT
@DEBUG
def cli(**given: Any) -> None:
    """Train as CONFIG says; fields can be set on the command line, as data.path=out/packed."""
    train(load_config, **given)


def train(
    load: Callable[[str, Sequence[str]], LaunchConfig],
    config: str,
    overrides: Sequence[str],
    accept_mismatch: Sequence[str],
    *,
    debug: bool,
) -> NoReturn:
    """Train as a configuration says, and end the process."""
    start_logging()
    with failing_in_one_line(debug=debug):
        from launch.data.packed_data import settle_validation

        loaded = settle_validation(load(config, overrides), overrides)
        if max(loaded.parallel.tensor, loaded.parallel.context) > 1:
            # Set before CUDA starts: kernels then start in the order of their launch, or work would
            # delay the communication that overlaps with it. Megatron-LM's `validate_args` asks for
            # the same, and forbids it under FSDP.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        from launch.loop.setup import run

        sys.exit(run(loaded, accept_mismatch))


@contextmanager
def failing_in_one_line(*, debug: bool) -> Iterator[None]:
    """End the process on an error, and check the versions of packages first. If all ranks of a node
    have the same error, one prints it."""
    try:
        require_supported(*SUPPORTED)
        yield
    except Exception as error:
        if debug:
            raise
        is_ours = isinstance(error, StageError | ValueError | UnsupportedVersionError)
        is_alike = is_ours and not isinstance(error, DiskFullError)
        known = is_ours or isinstance(error, RuntimeError | OSError | ImportError)
        text = reason(error) if known else f"{type(error).__name__}: {error} (--debug shows where)"
        if os.environ.get("LOCAL_RANK", "0") == "0" or not is_alike:
            click.echo(f"error: {' '.join(text.split())}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:  # before the first step or in the export: a step is not interrupted
        click.echo("stopped by SIGINT; run again to continue", err=True)
        sys.exit(128 + signal.SIGINT)


def reason(error: Exception) -> str:
    """Return an error's text without the traceback that torch adds to errors of a loader's worker,
    and the sample's fields that Energon puts first. If an import of transformers failed, the text
    names the package that caused it, such as torchvision, and the remedy; if a loader's process
    died, it says so, and not what this interrupted."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for one in chain:
        if dead := _DEAD_WORKER.search(str(one)):
            return (
                f"a process that loads packs died: {dead[0].rstrip('. ')}; lower data.num_workers "
                "if memory ran out, and run again to continue from the last checkpoint"
            )
    if isinstance(error, ImportError) and len(chain) > 1:
        root = chain[-1]
        return (
            f"{str(error).splitlines()[0]} {type(root).__name__}: {root}; install a version of "
            "that package that fits your PyTorch, or remove it"
        )
    text = str(error)
    _, traceback, rest = text.rpartition('\n  File "')
    raised = _RAISED.search(rest) if traceback else None
    return (raised[1] if raised else text).rpartition("failed due to system exception: ")[2]


def start_logging() -> None:
    """Show our messages and warnings from rank 0, and from other ranks what only they can see:
    samples left out of their rows, and requests that failed. Hide remarks of libraries on missing
    packages, and on their names that a later version replaces."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("launch").setLevel(logging.INFO)
    else:
        for name in _ALIKE:
            logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger("launch.data.micro_batches").setLevel(logging.WARNING)
    deprecated = "full scope|_tensor`|gradient_checkpointing(_enable)?`"
    warnings.filterwarnings(
        "ignore", message=f".*(Apex|Transformer Engine|pin_memory|({deprecated}) is deprecated)"
    )


if __name__ == "__main__":
    cli()
