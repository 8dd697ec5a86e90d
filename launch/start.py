"""Start of a node's ranks:
`python -m launch.start [TORCHRUN OPTIONS] -m launch.train CONFIG [key.sub=value ...]`, or
`-m launch.train_transformers`.

Like torchrun, but mistakes in command, configuration, environment or data are reported in one line
before any rank starts, and a failing rank says why itself: no torchrun traceback.

Exit status: the first failing rank's, or 128 and the number of the signal that stopped the run.
"""

import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from launch import train_transformers
from launch.config import LaunchConfig, load_config
from launch.train import cli, failing_in_one_line, start_logging

#: Commands that a rank may run, each with the function that reads its configuration.
_COMMANDS: Final[dict[str, Any]] = {
    "launch.train": (cli, load_config),
    "launch.train_transformers": (train_transformers.main, train_transformers.load_config),
}


def main(arguments: Sequence[str]) -> int:
    """Check the command, start the ranks of a node, and wait for them. Returns the exit status."""
    at = list(arguments).index("-m") if "-m" in arguments else len(arguments)
    options, module, rest = arguments[:at], "".join(arguments[at + 1 : at + 2]), arguments[at + 2 :]
    if module not in _COMMANDS:
        click.echo(f"error: give {' or '.join(f'-m {name}' for name in _COMMANDS)}", err=True)
        return 2
    command, load = _COMMANDS[module]
    if not rest or {"-h", "--help"} & set(rest):
        command(list(rest))
    start_logging()
    try:
        parsed = command.make_context(module, list(rest)).params
    except click.ClickException as error:
        error.show()
        return error.exit_code
    if remark := lonely_nodes(options):
        logging.getLogger("launch").warning(remark)
    with failing_in_one_line(debug=parsed["debug"]):
        rest = [*rest, *_check(load(parsed["config"], parsed["overrides"]), parsed["overrides"])]
        from torch.distributed import DistError, run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main([*options, "-m", module, *rest])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0:
            click.echo(f"error: {failure.message.splitlines()[0]}", err=True)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except DistError as error:
        remedy = "set MASTER_PORT to a free port, and MASTER_ADDR to the first node's name"
        click.echo(f"error: ranks cannot meet: {str(error).splitlines()[0]}; {remedy}", err=True)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def lonely_nodes(options: Sequence[str]) -> str:
    """Return a warning if several nodes have no address to meet at; else an empty text."""
    given = dict(itertools.pairwise(options))
    nodes, address = given.get("--nnodes", "1"), given.get("--master-addr", "127.0.0.1")
    if nodes == "1" or address not in ("127.0.0.1", "localhost"):
        return ""
    return (
        f"NNODES={nodes} with MASTER_ADDR={address}: a node waits there for nodes of this machine "
        "only; set MASTER_ADDR to the first node's name, and NODE_RANK on each"
    )


def _check(config: LaunchConfig, overrides: Sequence[str]) -> list[str]:
    """Check the run's settings before any rank starts. Returns further overrides for the ranks."""
    from launch.data import packed_data
    from task_encoders.settings import PackingSettings

    settings = PackingSettings.from_env()
    if config.data.online is not None:
        return []
    paths = config.data.paths
    data = [packed_data.read_packed_data(path) for path in paths]
    tasks = {*packed_data.largest_of(paths, data).tasks}
    for task in sorted(tasks):
        settings.resolve_task(task, blend=len(tasks) > 1)
    for path in paths:
        packed_data.check_room(path, config.parallel.context)
    settled = packed_data.settle_validation(config, overrides)
    return [] if settled is config else ["validation={}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
