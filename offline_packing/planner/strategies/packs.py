"""The result that every packing strategy returns."""

from typing import NamedTuple

import numpy as np


class Packs(NamedTuple):
    """Pack i holds the samples ``sample_ids[pack_offsets[i]:pack_offsets[i + 1]]``.

    Three packs of five samples: ``sample_ids [4, 0, 2, 1, 3]``, ``pack_offsets [0, 2, 3, 5]``.
    """

    #: int32 or int64 (num_samples,): indices into the ``num_tokens`` that was packed
    sample_ids: np.ndarray
    #: int64 (num_packs + 1,): starts at 0, ends at num_samples, no pack is empty
    pack_offsets: np.ndarray

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.pack_offsets) - 1
