"""PackPlan: which samples form which pack, as arrays in memory and as a folder on disk.

plan/sample_ids.npy          int32 or int64 (num_packed,)
plan/pack_offsets.npy        int64 (num_packs + 1,)
plan/set_aside_ids.npy       int32 or int64 (num_set_aside,)
plan/set_aside_reasons.npy   uint8 (num_set_aside,): index into reason_names
plan/branches.npy            uint8 (num_packed,), if samples share prefixes
plan/plan.json               everything else; written last, so its presence means complete
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.errors import StageError
from offline_packing.planner.ranks.layout import RankLayout
from offline_packing.storage.files import (
    atomic_file,
    load_array,
    read_json,
    to_json,
    write_atomically,
)
from task_encoders.packs.manifest import html_table
from task_encoders.storage.paths import path_of

FORMAT_VERSION = 1
_ENTRIES_AT_ONCE = 1 << 20
_ARRAYS = ("sample_ids", "pack_offsets", "set_aside_ids", "set_aside_reasons")


@dataclass(frozen=True)
class PlanInfo:
    """Settings and totals of a plan; tokens count the padding of samples."""

    seq_length: int
    strategy: str
    seed: int
    pad_multiple: int
    #: tokens in all packs, each sample padded to pad_multiple; a shared prefix counts once, and its
    #: samples are padded together
    num_tokens: int
    #: no plan for these samples has fewer packs (of the same groups and budgets)
    lower_bound: int
    #: names of the reasons that ``set_aside_reasons`` indexes
    reason_names: tuple[str, ...] = ()
    #: uses of samples beyond the first of each
    num_copies: int = 0
    #: packs of each split, in order, if there are several
    splits: dict[str, int] = field(default_factory=dict)
    #: further settings in words, for the report: budgets, assignment, order
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class PackPlan:
    """Pack i holds the samples ``sample_ids[pack_offsets[i]:pack_offsets[i + 1]]``.

    Every sample of the input is either in packs, in one unless it has copies, or in
    ``set_aside_ids``.
    """

    #: int32 or int64 (num_packed,): indices into ``num_tokens``
    sample_ids: np.ndarray
    #: int64 (num_packs + 1,)
    pack_offsets: np.ndarray
    #: int32 or int64 (num_set_aside,): ascending
    set_aside_ids: np.ndarray
    #: uint8 (num_set_aside,): index into ``info.reason_names``
    set_aside_reasons: np.ndarray
    info: PlanInfo
    #: uint8 (num_packed,): 1 for a sample that shares its prefix with the one before it in its
    #: pack; None: samples are stored whole
    branches: np.ndarray | None = None

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.pack_offsets) - 1

    @property
    def order(self) -> RankLayout | None:
        """The loader whose ranks get packs of similar cost at each step, if any."""
        layout = self.info.settings.get("order")
        return RankLayout(**layout) if layout else None

    @property
    def room(self) -> int:
        """Tokens that all packs could hold."""
        return self.num_packs * self.info.seq_length

    @property
    def gap(self) -> float:
        """Packs above the lower bound, as a share of it: 0.0 is proven optimal."""
        bound = self.info.lower_bound
        return self.num_packs / bound - 1 if bound else 0.0

    @property
    def fill(self) -> float:
        """Tokens over the room in all packs, 0.0 to 1.0."""
        return self.info.num_tokens / (self.room or 1)

    @property
    def packing_factor(self) -> float:
        """Mean samples per pack: by how much the batch size in samples grows."""
        return len(self.sample_ids) / (self.num_packs or 1)

    def __len__(self) -> int:
        return self.num_packs

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the sample ids of each pack."""
        return map(self.pack, range(self.num_packs))

    def __repr__(self) -> str:
        return (
            f"PackPlan({self.num_packs:,} packs of {self.info.seq_length:,} tokens, "
            f"{len(self.sample_ids):,} samples, {len(self.set_aside_ids):,} set aside, "
            f"fill {self.fill:.2%}, gap {self.gap:.3%})"
        )

    def _repr_html_(self) -> str:
        """Show the plan in a notebook."""
        rows = {
            "packs": f"{self.num_packs:,} of {self.info.seq_length:,} tokens",
            "samples in packs": f"{len(self.sample_ids):,} ({self.packing_factor:.2f} per pack)",
            "fill": f"{self.fill:.2%}",
            "packs above the lower bound": f"{self.gap:.3%}",
            "strategy": self.info.strategy,
            **{f"set aside: {reason}": f"{n:,}" for reason, n in self.set_aside_counts().items()},
        }
        return html_table("PackPlan", rows)

    def pack(self, index: int) -> np.ndarray:
        """Sample ids of one pack, a view."""
        return self.sample_ids[self.pack_offsets[index] : self.pack_offsets[index + 1]]

    def of(self, ids: np.ndarray) -> "PackPlan":
        """Return the same plan with ``ids`` in place of the samples' numbers."""
        return replace(self, sample_ids=ids[self.sample_ids], set_aside_ids=ids[self.set_aside_ids])

    def copy_numbers(self) -> np.ndarray | None:
        """Return the number of earlier uses of each of ``sample_ids``, int32 (num_packed,): 0 for
        the first use of a sample. None where none is used twice."""
        if self.info.num_copies == 0:
            return None
        from offline_packing.planner.exchange import rounds_of_copies  # compiled: takes time

        return rounds_of_copies(self.sample_ids)

    def set_aside_counts(self) -> dict[str, int]:
        """Number of samples set aside for each reason."""
        counts = np.bincount(self.set_aside_reasons, minlength=len(self.info.reason_names))
        names = self.info.reason_names
        return {name: int(count) for name, count in zip(names, counts, strict=True) if count}

    def statistics(self) -> dict[str, Any]:
        """Return the figures for the report and the log."""
        return {
            "num_packs": self.num_packs,
            "lower_bound": self.info.lower_bound,
            "gap": self.gap,
            "fill": self.fill,
            "packing_factor": self.packing_factor,
            "num_packed_samples": len(self.sample_ids),
            "num_set_aside": len(self.set_aside_ids),
            "set_aside_counts": self.set_aside_counts(),
        }

    def save(self, folder: str | Path, *, id_type: np.dtype[Any] | type | None = None) -> None:
        """Write the plan as a folder of .npy files, with ids of another type than in memory if one
        is given; an interrupted write is never loadable.

        The old plan.json goes first and the new one comes last; each file is renamed into place.
        Raises StageError if the disk is full.
        """
        folder = path_of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").unlink(missing_ok=True)
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        arrays |= {} if self.branches is None else {"branches": self.branches}
        for name, array in arrays.items():
            dtype = np.dtype(id_type if id_type and name.endswith("_ids") else array.dtype)
            # as `np.save` would write an array of this type, some of it at a time
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
            with atomic_file(folder / f"{name}.npy") as file:
                np.lib.format.write_array_header_1_0(file, {**header, "shape": array.shape})
                for start in range(0, len(array), _ENTRIES_AT_ONCE):
                    file.write(array[start : start + _ENTRIES_AT_ONCE].astype(dtype).data)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        document = {"format_version": FORMAT_VERSION, "shapes": shapes, **asdict(self.info)}
        document["statistics"] = self.statistics()
        write_atomically(folder / "plan.json", to_json(document))

    @classmethod
    def load(cls, folder: str | Path) -> "PackPlan":
        """Read a plan; its arrays stay on disk and are paged in as needed.

        Raises FileNotFoundError if the plan is absent or incomplete, StageError if one of its files
        is damaged, ValueError if the plan is of another format version or an array does not have
        the recorded shape.
        """
        folder = path_of(folder)
        document = read_json(folder / "plan.json")
        if document is None:
            raise FileNotFoundError(
                f"no complete plan in {folder}: plan.json is missing; run the plan stage again"
            )
        if document.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"plan {folder} has format_version {document.get('format_version')}, "
                f"this version reads {FORMAT_VERSION}; plan again"
            )
        arrays = {}
        for name in document["shapes"].keys() & cls.__dataclass_fields__.keys():
            shape = document["shapes"][name]
            path = folder / f"{name}.npy"
            try:
                arrays[name] = load_array(path)
            except (OSError, EOFError, ValueError) as error:
                raise StageError(f"{path} cannot be read: {error}; plan again") from error
            if list(arrays[name].shape) != shape:
                raise ValueError(
                    f"{path} has shape {list(arrays[name].shape)}, plan.json says {shape}; plan "
                    "again"
                )
        try:
            document["reason_names"] = tuple(document["reason_names"])
            info = PlanInfo(**{name: document[name] for name in PlanInfo.__dataclass_fields__})
        except (KeyError, TypeError) as error:
            raise StageError(f"{folder}/plan.json is damaged: {error}; plan again") from error
        return cls(**arrays, info=info)
