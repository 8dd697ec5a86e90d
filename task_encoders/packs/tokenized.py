"""Token ids that are stored in a pack, so that training need not tokenize."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

#: What stands for an image or a video in token ids that are stored without media.
IMAGE_ID: Final = -1
VIDEO_ID: Final = -2


class TokenizedText(NamedTuple):
    """A sample's token ids, with one IMAGE_ID or VIDEO_ID per image or video, whatever its size."""

    ids: Sequence[int]
    #: start and end in `ids` of each run of tokens with loss, in turn
    loss: Sequence[int]


#: Where a medium stands in a text: its first token, and how many it has.
Place = tuple[int, int]


class ExpandedText(NamedTuple):
    """A sample's token ids as they are trained, with all the tokens of its media."""

    tokens: npt.NDArray[np.int64]  #: (S,)
    labels: npt.NDArray[np.int64]  #: (S,), not shifted; IGNORE_INDEX where there is no loss
    images: Sequence[Place]
    videos: Sequence[Place]


def collapse(
    tokens: npt.NDArray[np.integer],
    loss: Sequence[int],
    images: Iterable[Place],
    videos: Iterable[Place],
) -> TokenizedText:
    """The text whose expansion has these (S,) tokens, with media at these places of it."""
    ids = np.array(tokens, dtype=np.int64)
    kept = np.ones(len(ids), dtype=np.bool_)
    for mark, places in ((IMAGE_ID, images), (VIDEO_ID, videos)):
        for start, count in places:
            ids[start] = mark
            kept[start + 1 : start + count] = False
    return TokenizedText(ids[kept].tolist(), loss)


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
