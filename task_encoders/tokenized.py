"""Token ids that are stored in a pack, so that training need not tokenize."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

#: What stands for an image or a video in token ids that are stored without media.
IMAGE_ID: Final = -1
VIDEO_ID: Final = -2


class TokenizedText(NamedTuple):
    """A sample's token ids, with one IMAGE_ID or VIDEO_ID per image or video, whatever its size."""

    ids: Sequence[int]
    #: start and end in `ids` of each run of tokens with loss, in turn
    loss: Sequence[int]


class TokenizedPack(NamedTuple):
    """The texts of a pack's sub-samples, and the digest of the settings they were made with."""

    texts: Sequence[TokenizedText]
    made_with: str

    def meta(self) -> dict[str, Any]:
        """The fields that hold them in the `meta` of a pack's JSON."""
        ids, loss = zip(*self.texts, strict=True)
        return {"tokenized_with": self.made_with, "token_ids": ids, "loss": loss}


def fingerprint_digest(fingerprint: Mapping[str, str | int]) -> str:
    """16 hexadecimal digits that identify a fingerprint."""
    text = json.dumps(dict(sorted(fingerprint.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
