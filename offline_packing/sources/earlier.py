"""Names of earlier versions that sources of others may import. Nothing here uses them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes `begin` to `end` of a file, and their xxh3_128."""

    begin: int
    end: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class Growth:
    """What a source had beyond what was measured before, when outputs could be appended to."""

    added: bytes
    num_added: int
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
