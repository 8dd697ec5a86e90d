"""Text to token ids, with the ids of the checkpoint's own tokenizer.

Special tokens written inside text are data here: only the chat template makes control tokens, from
`special_id`, unless `model.control_tokens` names them. Added tokens that are not special, such as
`<tool_call>`, can be spelled in text, as in transformers. A byte-level BPE tokenizer (every Qwen)
runs on tiktoken, five times as fast as transformers' on one core; any other is used through
transformers, and a log line says so.
"""

import functools
import itertools
import json
import logging
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import tiktoken
import xxhash

from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SampleError
from task_encoders.samples.limits import MAX_MARKS, MAX_WHITE_SPACE
from task_encoders.text.qwen_vocabulary import (
    BUILTIN,
    QWEN_PATTERN,
    QWEN_SPECIAL_TOKENS,
    qwen_ranks,
)
from task_encoders.versions import SUPPORTED, require_supported

logger = logging.getLogger(__name__)

_MARKS: Final = {IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER}


class Tokenizer(ABC):
    """A vocabulary with added tokens: control tokens and tokens that text can spell."""

    fingerprint: str
    #: that only a template makes; spelled in text they are data
    control_tokens: tuple[str, ...]
    #: added tokens by name
    _added: Mapping[str, int]
    _id_of: Callable[[str], int | None]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are data. Raises SampleError."""

    @abstractmethod
    def encode_answer(self, header: str, answer: str) -> tuple[list[int], int]:
        """Encode header + answer; return the ids, and the index of the first in the answer."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ordinary tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def special_id(self, token: str) -> int:
        """Return the id of an added token. Raises ValueError if the vocabulary lacks it."""
        token_id = self._id_of(token)
        if token_id is None:
            raise ValueError(
                f"the tokenizer has no special token {token!r}; is it that of another family?"
            )
        return token_id

    def spell(self, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """Return ids as people read them: (text, False) for each run of ordinary tokens, (name,
        True) for each control token."""
        names = {token_id: token for token, token_id in self._added.items()}
        for is_control, some in itertools.groupby(ids, key=names.__contains__):
            if is_control:
                yield from ((names[token_id], True) for token_id in some)
            else:
                yield self._decode(list(some)), False


class TiktokenTokenizer(Tokenizer):
    """A byte-level BPE with NFC normalisation, on tiktoken."""

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        pattern: str,
        special: Mapping[str, int],
        text_tokens: Mapping[str, int] | None = None,
        *,
        nfc: bool,
    ) -> None:
        """Build the encoding of control tokens, `special`, and others that text can spell."""
        text_tokens = text_tokens or {}
        self._encoding = tiktoken.Encoding(
            "bpe", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(text_tokens)
        )
        self.control_tokens = tuple(special)
        self._added = {**special, **text_tokens}
        self._id_of = self._added.get
        self._text_tokens = text_tokens
        longest_first = sorted(text_tokens, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._nfc = nfc
        described = [pattern, nfc, sorted(special.items())]
        if text_tokens:
            described.append(sorted(text_tokens.items()))
        digest = xxhash.xxh3_128(json.dumps(described).encode())
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            digest.update(b"%d %d " % (rank, len(token)) + token)
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        if not self._text_tokens:
            return self._encode_ordinary(text)
        ids: list[int] = []
        # 'a<tool_call>b' -> 'a', '<tool_call>', 'b'; before NFC, as transformers cuts it
        for i, part in enumerate(self._cut(text)):
            ids += [self._text_tokens[part]] if i % 2 else self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        check_runs(text)
        if self._nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:  # noqa: BLE001 - a panic is one
            raise sample_error_of(error) from None

    def encode_answer(self, header: str, answer: str) -> tuple[list[int], int]:
        ids = self.encode(header + answer)
        remaining = len(header.encode())
        for i, token in enumerate(ids):
            remaining -= len(self._encoding.decode_single_token_bytes(token))
            if remaining < 0:
                return ids, i
        return ids, len(ids)

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode_bytes(ids).decode(errors="replace")


class TransformersTokenizer(Tokenizer):
    """Any fast tokenizer of transformers, unchanged."""

    def __init__(self, tokenizer: Any, spelled: Collection[str] = ()) -> None:
        """Copy a tokenizer. `spelled` are special tokens that text can spell."""
        backend = tokenizer.backend_tokenizer
        # Of whoever saved the checkpoint; transformers sets both anew whenever it encodes.
        backend.no_truncation()
        backend.no_padding()
        # A copy, since `encode_special_tokens` (special tokens are data) is a lasting switch.
        spec = backend.to_str()
        if spelled:
            parsed = json.loads(spec)
            for token in parsed["added_tokens"]:
                token["special"] &= token["content"] not in spelled
            spec = json.dumps(parsed)
        self.spec = spec
        self._backend = type(backend).from_str(spec)
        self._backend.encode_special_tokens = True
        self.fingerprint = xxhash.xxh3_128_hexdigest(spec.encode())
        added = self._backend.get_added_tokens_decoder()
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._id_of = self._backend.token_to_id
        self.control_tokens = tuple(one.content for one in added.values() if one.special)

    def encode(self, text: str) -> list[int]:
        return self._encode(text).ids

    def encode_answer(self, header: str, answer: str) -> tuple[list[int], int]:
        encoding = self._encode(header + answer)
        first = (i for i, (_, end) in enumerate(encoding.offsets) if end > len(header))
        return encoding.ids, next(first, len(encoding.ids))

    def _encode(self, text: str) -> Any:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except BaseException as error:  # noqa: BLE001 - a panic is one
            raise sample_error_of(error) from None

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids))


def control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of the names of control tokens in text, where they are data. `<image>`,
    which some vocabularies have, is not among them: in text it marks an image."""
    names = sorted({*tokenizer.control_tokens} - _MARKS, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def check_runs(text: str) -> None:
    """Raise SampleError: too_costly for text that takes a tokenizer more than linear time, or the
    stack. Most texts are looked at in a few places: such a run holds one of every `limit`-th
    characters."""
    for what, is_one, limit in _RUNS if len(text) >= MAX_MARKS else ():
        if len(text) < limit or not any(map(is_one, text[::limit])):
            continue
        runs = itertools.groupby(map(bool, map(is_one, text)))
        if any(is_kind and sum(1 for _ in run) >= limit for is_kind, run in runs):
            raise SampleError("too_costly", f"{limit:,} {what} in a row; take them out of the text")


def sample_error_of(error: BaseException) -> BaseException:
    """Turn the panic of a tokenizer in Rust, whose stack ends, into SampleError: unexpected_error;
    return any other error unchanged. A panic is a BaseException, which nothing else catches."""
    if type(error).__name__ != "PanicException":
        return error
    detail = " ".join(f"the tokenizer panics: {error}".split())
    return SampleError("unexpected_error", detail[:200])


_RUNS: Final[tuple[tuple[str, Callable[[str], object], int], ...]] = (
    ("characters of white space", str.isspace, MAX_WHITE_SPACE),
    ("combining marks", unicodedata.combining, MAX_MARKS),
)


# Texts on which a tiktoken conversion must agree with the tokenizer it was made from.
_PROBES: Final = (
    "Hello world",
    "assistant\n\n\n  two  spaces,\ttab;\r\nI'll don't WE'RE 1234567890 3.14",
    "描述这张图片。图中有三个红色的圆形,价格为¥1,280。",
    "naïve café cafe\u0301 Ω≈ç√ 한국어 русский العربية 🙂👩‍👩‍👧‍👦",
    '<|im_start|>system\n<|image_pad|><tool_call>{"a": [1, 2]}</tool_call>',
    "<|fim_prefix|>cafe\u0301<think>\n<|file_sep|>\u0301</think>\n\n<tool_response>",
    "    def f(x):\n        return x ** 2  # comment\n\n\n",
)

_HUB_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES: Final = ("tokenizer_config.json", "config.json")
_TIMEOUT_SECONDS: Final = 10


def require_hub(name: str) -> None:
    """Do nothing for a folder, for a checkpoint that was downloaded before, and offline.

    Raises:
        ValueError: the checkpoint would have to be downloaded, and the hub is out of reach; or a
            package that reads checkpoints is not installed.
    """
    if name != BUILTIN and not (find_spec("transformers") and find_spec("huggingface_hub")):
        raise ValueError(
            f"processor {name!r} needs transformers and huggingface_hub; pip install "
            f"'transformers{SUPPORTED['transformers']}' (in a clone: pip install -e '.[train]')"
        )
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
        if isinstance(reason, ssl.SSLError):  # the hub's client has its own certificates
            return
        raise ValueError(
            f"processor {name!r} is not a folder here, and the hub {constants.ENDPOINT} is out of "
            f"reach ({reason}); name a folder with the checkpoint, set HF_ENDPOINT to a mirror, "
            "or use 'builtin' for Qwen's vocabulary"
        ) from error


def checkpoint_file(processor: str, name: str) -> Path | None:
    """Find a file of a checkpoint folder or a hub name; None if it has none within reach, as the
    built-in vocabulary."""
    if processor == BUILTIN:
        return None
    require_supported("transformers")
    from transformers.utils import cached_file

    quiet = ("missing_entries", "connection_errors")
    options = {f"_raise_exceptions_for_{problem}": False for problem in quiet}
    with suppress(OSError):
        found = cached_file(processor, name, **options)
        return Path(found) if found else None
    return None


def checkpoint_json(processor: str, name: str) -> Mapping[str, Any]:
    """Read an object in a JSON file of a checkpoint; {} if it has none. Raises ValueError for a
    damaged one."""
    file = checkpoint_file(processor, name)
    try:
        content = json.loads(file.read_bytes()) if file else {}
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


@functools.cache
def checkpoint_tokenizer(processor: str) -> Any:
    """Load the fast tokenizer of a checkpoint folder or a hub name; no remote code is run.

    Raises:
        ValueError: there is none of that name, or it is not a fast one.
    """
    from transformers import AutoTokenizer

    try:
        # With mistral-common installed, Mistral's tokenizer would otherwise not be fast.
        options = {"trust_remote_code": False, "mistral_format": False}
        tokenizer = AutoTokenizer.from_pretrained(processor, **options)
    except (OSError, ValueError) as error:
        raise ValueError(_explain_missing(processor)) from error
    if tokenizer.is_fast and tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        raise ValueError(_explain_missing(processor))  # transformers makes up an empty one
    if not tokenizer.is_fast:
        raise ValueError(
            f"checkpoint {processor!r} has no fast tokenizer; save its tokenizer.json there"
        )
    return tokenizer


@functools.cache
def load_tokenizer(
    processor: str, text_tokens: tuple[str, ...] = (), spelled: tuple[str, ...] = ()
) -> Tokenizer:
    """Load the tokenizer of "builtin", a checkpoint folder, or a hub name.

    Args:
        text_tokens: what a family adds to the built-in vocabulary after the special tokens.
        spelled: special tokens that text can spell; they do not change the fingerprint.

    Raises:
        ValueError: as checkpoint_tokenizer.
    """
    found: Tokenizer
    if processor == BUILTIN:
        ranks = qwen_ranks()
        special = {token: len(ranks) + i for i, token in enumerate(QWEN_SPECIAL_TOKENS)}
        first = len(ranks) + len(special)
        added = {token: first + i for i, token in enumerate(text_tokens)}
        added |= {token: special.pop(token) for token in spelled if token in special}
        found = TiktokenTokenizer(ranks, QWEN_PATTERN, special, added, nfc=True)
    else:
        found = slow = TransformersTokenizer(checkpoint_tokenizer(processor), spelled)
        spec = json.loads(slow.spec)
        fast = _as_tiktoken(spec)
        if fast is not None and all(fast.encode(text) == slow.encode(text) for text in _PROBES):
            found = fast
            if any(not token["special"] for token in spec["added_tokens"]):
                fast.fingerprint = slow.fingerprint  # as when such tokenizers ran on transformers
        else:
            why = "no tiktoken form of this tokenizer; using transformers' own"
            logger.info("%s: %s", processor, why)
    if spelled:
        found.fingerprint = load_tokenizer(processor, text_tokens).fingerprint
    return found


def _explain_missing(processor: str) -> str:
    """Explain in a line why transformers found no tokenizer; its own error is a paragraph."""
    path = Path(processor)
    if path.is_dir():
        why = "is a folder without a tokenizer (tokenizer.json, tokenizer_config.json)"
    elif path.exists():
        why = "is a file"
    elif path.is_absolute() or processor.startswith((".", "~")):
        why = "does not exist"
    else:
        why = "is not a folder here, and not on the hub or out of reach (offline, or no access)"
    return f"processor {processor!r} {why}; name a checkpoint folder or a hub name, or {BUILTIN!r}"


def _as_tiktoken(spec: Mapping[str, Any]) -> TiktokenTokenizer | None:
    """Convert a tokenizer.json to tiktoken; None if it is not a byte-level BPE of known parts.

    tiktoken merges the pair whose result has the lowest rank, so the ranks must be the ids and the
    list of merges must be in the order of its results' ids.
    """
    model, steps = spec["model"], spec["pre_tokenizer"]
    steps = steps.get("pretokenizers", [steps]) if steps else []
    nfc = (spec["normalizer"] or {}).get("type") == "NFC"
    if (
        model["type"] != "BPE"
        or [step["type"] for step in steps] != ["Split", "ByteLevel"]
        or "Regex" not in steps[0]["pattern"]
        or steps[1]["add_prefix_space"]
        or not (nfc or spec["normalizer"] is None)
    ):
        return None
    added = {token["content"] for token in spec["added_tokens"]}
    vocab = {token: rank for token, rank in model["vocab"].items() if token not in added}
    unicode_to_byte = byte_level_alphabet()
    results: list[Any] = [vocab.get("".join(pair)) for pair in model["merges"]]
    if None in results or results != sorted(results):
        return None
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    if any(token[flag] for token in spec["added_tokens"] for flag in flags if not token["special"]):
        return None
    if any(character not in unicode_to_byte for token in vocab for character in token):
        return None
    ranks = {bytes(unicode_to_byte[c] for c in token): rank for token, rank in vocab.items()}
    special, text_tokens = (
        {one["content"]: one["id"] for one in spec["added_tokens"] if one["special"] == is_special}
        for is_special in (True, False)
    )
    return TiktokenTokenizer(ranks, steps[0]["pattern"]["Regex"], special, text_tokens, nfc=nfc)


def byte_level_alphabet() -> dict[str, int]:
    """Map GPT-2's printable characters to the 256 bytes that they stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
