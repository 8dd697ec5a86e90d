"""Text to token ids, with the ids of the checkpoint's own tokenizer.

Special tokens written inside text are data here: only the chat template makes control tokens, from
`special_id`. Added tokens that are not special, such as `<tool_call>`, can be spelled in text, as
in transformers. A byte-level BPE tokenizer (every Qwen) runs on tiktoken, five times as fast as
transformers' on one core; any other is used through transformers, and a log line says so.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import tiktoken
import xxhash

from task_encoders.samples import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, SampleError
from task_encoders.samples.limits import MAX_MARKS, MAX_WHITE_SPACE

_MARKS: Final = {IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER}


class Tokenizer(Protocol):
    """Interface of a tokenizer that encoding needs."""

    fingerprint: str
    #: that only a template makes; spelled in text they are data
    control_tokens: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are data. Raises SampleError."""

    def encode_answer(self, header: str, answer: str) -> tuple[list[int], int]:
        """Ids of header + answer, and the index of the first that overlaps the answer."""

    def special_id(self, token: str) -> int:
        """Id of an added token. Raises ValueError where the vocabulary has none."""

    def spell(self, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
        """Ids as people read them: (text, False) for each run of ordinary tokens, (name, True) for
        each control token. Bytes that are not valid UTF-8 become U+FFFD."""


class _AddedTokens:
    """Added tokens of a vocabulary, by name: control tokens and tokens that text can spell."""

    _added: Mapping[str, int]
    _id_of: Callable[[str], int | None]

    def special_id(self, token: str) -> int:
        token_id = self._id_of(token)
        if token_id is None:
            raise ValueError(
                f"the tokenizer has no special token {token!r}; is it that of another family?"
            )
        return token_id

    def spell(self, ids: Sequence[int]) -> Iterator[tuple[str, bool]]:
        names = {token_id: token for token, token_id in self._added.items()}
        for is_control, some in itertools.groupby(ids, key=names.__contains__):
            if is_control:
                yield from ((names[token_id], True) for token_id in some)
            else:
                yield self._decode(list(some)), False

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError


class TiktokenTokenizer(_AddedTokens):
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
        """`special` are control tokens; `text_tokens`, added tokens that text can spell."""
        text_tokens = text_tokens or {}
        self._encoding = tiktoken.Encoding(
            "bpe",
            pat_str=pattern,
            mergeable_ranks=dict(ranks),
            special_tokens=dict(text_tokens),
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
        ids: list[int] = []
        # 'a<tool_call>b' -> 'a', '<tool_call>', 'b'; before NFC, as transformers cuts it
        for i, part in enumerate(self._cut(text) if self._text_tokens else (text,)):
            if i % 2:
                ids.append(self._text_tokens[part])
                continue
            check_runs(part)
            if self._nfc and not part.isascii():
                part = unicodedata.normalize("NFC", part)
            try:
                ids += self._encoding.encode_ordinary(part)
            except BaseException as error:  # noqa: BLE001 - a panic is one
                raise sample_error_of(error) from None
        return ids

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


class TransformersTokenizer(_AddedTokens):
    """Any fast tokenizer of transformers, unchanged."""

    def __init__(self, tokenizer: Any) -> None:
        # A copy, since `encode_special_tokens` (special tokens are data) is a lasting switch.
        spec = tokenizer.backend_tokenizer.to_str()
        self._backend = type(tokenizer.backend_tokenizer).from_str(spec)
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
    """Finds the names of control tokens in text, where they are data; `<image>`, which some
    vocabularies have, is a mark of our own there."""
    names = sorted({*tokenizer.control_tokens} - _MARKS, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def check_runs(text: str) -> None:
    """Raise SampleError: too_costly for text that takes a tokenizer more than linear time, or the
    stack. Most texts are looked at in a few places: such a run holds one of every `limit`-th
    characters."""
    for what, is_one, limit in _RUNS:
        if len(text) < limit or not any(map(is_one, text[::limit])):
            continue
        runs = itertools.groupby(map(bool, map(is_one, text)))
        if any(is_kind and sum(1 for _ in run) >= limit for is_kind, run in runs):
            raise SampleError("too_costly", f"{limit:,} {what} in a row; take them out of the text")


def sample_error_of(error: BaseException) -> BaseException:
    """SampleError: unexpected_error for a tokenizer in Rust that panics, as it does where its stack
    ends; any other error unchanged. A panic is a BaseException, which nothing else catches."""
    if type(error).__name__ != "PanicException":
        return error
    detail = " ".join(f"the tokenizer panics: {error}".split())
    return SampleError("unexpected_error", detail[:200])


_RUNS: Final[tuple[tuple[str, Callable[[str], object], int], ...]] = (
    ("characters of white space", str.isspace, MAX_WHITE_SPACE),
    ("combining marks", unicodedata.combining, MAX_MARKS),
)
