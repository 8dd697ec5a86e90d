"""The most frequent answers of a source, counted part by part in bounded memory."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import xxhash

#: Characters of an answer that are shown.
_SHOWN: Final = 60
#: Different answers that are counted at a time, and the most frequent ones that stay.
_COUNTED: Final = 4096
_KEPT: Final = 64


class FrequentAnswers:
    """Counts of answers. One that is rare for a while is counted too low, so that frequent answers
    are exact, or somewhat low, and never too high."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, str]] = {}

    def add(self, answer: str) -> None:
        """Count an answer."""
        digest = xxhash.xxh3_64_hexdigest(answer.encode())
        count, shown = self._counts.get(digest) or (0, repr(answer[:_SHOWN]))
        self._counts[digest] = (count + 1, shown)
        if len(self._counts) > _COUNTED:
            self._counts = self.most()

    def most(self) -> dict[str, tuple[int, str]]:
        """Hash of a frequent answer -> its count, and its beginning."""
        most = sorted(self._counts.items(), key=lambda item: -item[1][0])
        return dict(most[:_KEPT])


def most_frequent(parts: Iterable[Mapping[str, tuple[int, str]]]) -> tuple[int, str]:
    """Count and beginning of the answer that is most frequent in all parts; (0, ''): none is given
    twice."""
    counts: Counter[str] = Counter()
    shown: dict[str, str] = {}
    for part in parts:
        for digest, (count, text) in part.items():
            counts[digest] += count
            shown.setdefault(digest, text)
    for digest, count in counts.most_common(1):
        if count > 1:
            return count, shown[digest]
    return 0, ""
