"""Token ids that are stored in a pack, so that training need not tokenize."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders.samples import IGNORE_INDEX, IMAGE_ID, VIDEO_ID


class TokenizedText(NamedTuple):
    """A sample's token ids, with one IMAGE_ID or VIDEO_ID per image or video, whatever its size."""

    ids: Sequence[int]
    #: start and end in `ids` of each run of tokens with loss, in turn
    loss: Sequence[int]
    #: the weight of each run; []: all have 1
    weights: Sequence[float]


def run_weights(text: TokenizedText) -> npt.NDArray[np.float32]:
    """The loss weight of each id of a text, 0 where there is no loss."""
    found = np.zeros(len(text.ids), dtype=np.float32)
    runs = zip(text.loss[::2], text.loss[1::2], text.weights or itertools.repeat(1.0), strict=False)
    for start, end, weight in runs:
        found[start:end] = weight
    return found


#: Place of a medium in a text: its first token, and how many it has.
Place = tuple[int, int]


class ExpandedText(NamedTuple):
    """A sample's token ids as they are trained, with all the tokens of its media."""

    tokens: npt.NDArray[np.int64]  #: (S,)
    loss_weights: npt.NDArray[np.float32]  #: (S,), not shifted; 0 where there is no loss
    images: Sequence[Place]
    videos: Sequence[Place]


def labels_of(
    tokens: npt.NDArray[np.int64], loss_weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Return (S,) each token that has a weight, and IGNORE_INDEX for the others."""
    return np.where(loss_weights > 0, tokens, IGNORE_INDEX)


def collapse(
    tokens: npt.NDArray[np.integer], images: Iterable[Place], videos: Iterable[Place]
) -> list[int]:
    """The ids of the text whose expansion has these (S,) tokens, with media at these places."""
    ids = np.array(tokens, dtype=np.int64)
    kept = np.ones(len(ids), dtype=np.bool_)
    for mark, places in ((IMAGE_ID, images), (VIDEO_ID, videos)):
        for start, count in places:
            ids[start] = mark
            kept[start + 1 : start + count] = False
    return list(ids[kept].tolist())


class TokenizedPack(NamedTuple):
    """The texts of a pack's sub-samples, and the digest of the settings they were made with."""

    texts: Sequence[TokenizedText]
    made_with: str

    def meta(self) -> dict[str, Any]:
        """The fields that hold them in the `meta` of a pack's JSON."""
        ids, loss, weights = zip(*self.texts, strict=True)
        meta = {"tokenized_with": self.made_with, "token_ids": ids, "loss": loss}
        return meta | ({"loss_weights": weights} if any(weights) else {})


def fingerprint_digest(fingerprint: Mapping[str, str | int]) -> str:
    """16 hexadecimal digits that identify a fingerprint."""
    text = json.dumps(dict(sorted(fingerprint.items())))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
