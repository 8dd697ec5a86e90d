"""Diagnosis of a source: content of records that their samples lack, control tokens in texts, and
answers that are all the same.

A mistake is rarely made in one record alone: the first 4,096 records of a source are looked at, and
one in a hundred after them, by their numbers in the source. Where its listing does not count
records, as in tars and compressed files, its files have equal shares of the 4,096. Counts are
estimates for all samples, and exact for up to 4,096.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import xxhash

from offline_packing.index.table import escape
from offline_packing.sources import SourcePart, SourceRecord
from offline_packing.sources.lost_fields import clipped_images, control_text, lost_fields
from offline_packing.sources.options import FieldMap
from task_encoders.families.base.family import FamilyEncoder
from task_encoders.samples import SourceSample
from task_encoders.text.tokenizer import control_pattern

#: First records of a source, all looked at; later ones once in ONE_IN.
NUM_FIRST: Final = 4096
ONE_IN: Final = 100
#: Different answers that are counted at a time, and the most frequent ones that stay: one that is
#: rare for a while is counted too low.
_COUNTED: Final = 4096
_KEPT: Final = 64
#: Characters of an answer that are shown, and of its hash before them.
_SHOWN: Final = 60
_DIGITS: Final = 16


class Diagnosis:
    """Diagnosis of a part of a source; its first `num_first` records are all looked at."""

    def __init__(self, fields: FieldMap, encoder: FamilyEncoder, num_first: int) -> None:
        self._fields, self._num_first = fields, num_first
        self._control = control_pattern(encoder.tokenizer), encoder.written_tokens
        self._notes = encoder.notes
        #: of the first records, and of the others: samples that lack something, and "": all
        self._lost: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        #: the same by an answer's hash and beginning
        self._answers: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._examples: dict[str, str] = {}

    def add(
        self, number: int, record: SourceRecord, sample: SourceSample, modes: Mapping[str, str]
    ) -> None:
        """Look at a record, if its number in the part is among the chosen. `modes` are Pillow's
        modes of its images, by their names."""
        since_first = number - self._num_first
        if since_first > 0 and since_first % ONE_IN:
            return
        is_later = since_first >= 0
        lost = [*lost_fields(record, sample, self._fields), *clipped_images(modes)]
        lost += [*control_text(sample, *self._control), *self._notes(sample)]
        for what, shown in sorted(lost):
            what = escape(what)
            self._lost[is_later][what] += 1
            self._examples.setdefault(what, escape(f"{sample.key}: {shown}".strip(": ")))
        self._lost[is_later][""] += 1
        answer = "\n".join([text for one in sample.turns for text in (one.answer, *one.calls)])
        answers = self._answers[is_later]
        answers[xxhash.xxh3_64_hexdigest(answer.encode()) + repr(answer[:_SHOWN])] += 1
        if len(answers) > _COUNTED:
            for rare, _ in answers.most_common()[_KEPT:]:
                del answers[rare]

    def notes(self) -> dict[str, Any]:
        """Return the counts that `estimate` takes, as JSON."""
        answers = [dict(one.most_common(_KEPT)) for one in self._answers]
        return {"lost": self._lost, "answers": answers, "examples": self._examples}


def shares_of_first(parts: Sequence[SourcePart]) -> list[int]:
    """Number of a source's first records that each part begins with; below 0: number of records
    between them and the part."""
    share = NUM_FIRST // max(1, sum(part.num_records is None for part in parts))
    before = accumulate((part.num_records or 0 for part in parts), initial=0)
    return [
        share if part.num_records is None else NUM_FIRST - count
        for part, count in zip(parts, before, strict=False)
    ]


def estimate(
    parts: Iterable[tuple[int, int, Mapping[str, Any]]],
) -> tuple[dict[str, tuple[int, str]], tuple[int, str]]:
    """Estimate for all samples from source, number of samples and `Diagnosis.notes` of each part,
    in order: unused part -> number of samples, and an example; count and beginning of the most
    frequent answer, (0, '') if none is given twice."""
    counts: defaultdict[int, list[Counter[str]]] = defaultdict(lambda: [Counter(), Counter()])
    num_samples, totals = Counter[int](), Counter[str]()
    examples: dict[str, str] = {}
    for source, count, notes in parts:
        num_samples[source] += count
        examples = {**notes["examples"], **examples}
        for kind in ("lost", "answers"):
            for own, others in zip(counts[source], notes[kind], strict=True):
                own.update({f"{kind} {name}": count for name, count in others.items()})
    for source, (first, later) in counts.items():
        weight = (num_samples[source] - first["lost "]) / max(1, later["lost "])
        for name in first | later:
            totals[name] += round(first[name] + weight * later[name])
    lost = {what: (totals[f"lost {what}"], example) for what, example in examples.items()}
    answers = {name: count for name, count in totals.items() if name.startswith("answers ")}
    most = max(answers, key=answers.__getitem__, default="")
    if answers.get(most, 0) < 2:
        return lost, (0, "")
    return lost, (answers[most], most[len("answers ") + _DIGITS :])
