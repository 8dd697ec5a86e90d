"""Fingerprints: what a refusal says."""

import pytest

from offline_packing.errors import StageError
from offline_packing.runs.artifacts import check_fingerprint
from offline_packing.storage.files import to_json


def test_values_are_shown_on_one_line_as_they_are_written() -> None:
    def encoded(value: object) -> str | int:
        return to_json(value).decode()

    found = {
        "seed": 1,
        "order": encoded(None),
        "fill": encoded(0.0),
        "text": "a",
        "old": 3,
    }
    wanted = {
        "seed": 1,
        "order": encoded({"num_ranks": 2}),
        "fill": encoded(0.5),
        "text": "b",
    }
    with pytest.raises(StageError) as error:
        check_fingerprint(found, wanted, artifact="the shards in out", remedy="write again")
    assert str(error.value) == (
        "the shards in out cannot be used: fill was 0.0, is 0.5; old was 3, is not set; "
        "order was null, is {\"num_ranks\": 2}; text was 'a', is 'b'; write again"
    )


def test_fields_explain_themselves() -> None:
    with pytest.raises(StageError, match="used: a lost a file; b was 1, is 2; remedy"):
        check_fingerprint(
            {"a": "x", "b": 1},
            {"a": "y", "b": 2},
            artifact="it",
            remedy="remedy",
            explain={"a": "a lost a file"}.get,
        )
