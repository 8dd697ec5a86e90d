"""Imports for collecting tests, and in the server that forks ranks. Nearly everything is imported
there, and all of it stays: to look for garbage meanwhile takes 3 s, and loggers that Megatron
imports where they are installed take 2 s. From the import of this module until `end`, neither is
done."""

import gc
import sys
from pathlib import Path

#: Other trainers may need them: not in their environments.
_LOGGERS = ("wandb", "torch.utils.tensorboard")
_IS_PEER = (Path(__file__).parents[1] / f"peers/{Path(sys.prefix).name}.txt").is_file()

gc.disable()
if not _IS_PEER:
    sys.modules.update(dict.fromkeys(_LOGGERS))  # type: ignore[arg-type]


def end() -> None:
    """Collect garbage again, and let the loggers be imported."""
    gc.enable()
    for name in _LOGGERS:
        if sys.modules.get(name, gc) is None:
            del sys.modules[name]
