"""Check once whether the model hub answers: transformers would retry for a minute."""

import re
from pathlib import Path
from typing import Final

_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES: Final = ("tokenizer_config.json", "config.json")
_TIMEOUT_SECONDS: Final = 10


def require_hub(name: str) -> None:
    """Do nothing for a folder, for a checkpoint that was downloaded before, and offline.

    Raises:
        ValueError: the checkpoint would have to be downloaded, and the hub is out of reach.
    """
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return
    import ssl
    import urllib.error
    import urllib.request

    from huggingface_hub import constants, try_to_load_from_cache

    is_cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES)
    if is_cached or constants.HF_HUB_OFFLINE:
        return
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return  # an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # the hub's client has certificates of its own
            return
        raise ValueError(
            f"processor {name!r} is not a folder here, and the hub {constants.ENDPOINT} is out of "
            f"reach ({reason}); name a folder with the checkpoint, set HF_ENDPOINT to a mirror, "
            "or use 'builtin' for Qwen's vocabulary"
        ) from error
