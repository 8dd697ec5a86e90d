"""What a pack's reader decides: its members and its JSON, the metadata of all shards, and what is
not packed for it. `container` writes and reads the shards.
"""

from collections.abc import Sequence
from typing import ClassVar

from offline_packing.errors import ChangedError
from offline_packing.layouts.shards import PlannedSample, ShardTask, trees_of
from offline_packing.layouts.unfit import Grids, Model, Sizes
from offline_packing.sources import Locator, Source
from offline_packing.sources.roots.roots import MediaRoot
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack_format import JSON_PART, PackedSubSample, media_part_names, pack_json
from task_encoders.packs.stored_media import Place
from task_encoders.samples import SourceSample

#: Name of a pack's member without its key, and content.
Member = tuple[str, bytes]


class Layout:
    """Packs as the task encoder here reads them. Stateless: tasks name it, and look it up in
    LAYOUTS."""

    #: whether all samples of a pack must have images, or videos, or neither
    ONE_MEDIUM: ClassVar[bool] = False

    def check(self, task: str, family: str) -> None:
        """Raise ValueError if it holds no packs of a task, or of a model family."""

    def refuse(self, model: Model) -> None:
        """Raise StageError if it holds no packs of a model (its part of the fingerprint)."""

    @classmethod
    def has_rules(cls) -> bool:
        """Tell whether `unfit` and `added_tokens` say anything."""
        return cls.unfit is not Layout.unfit

    def unfit(self, sample: SourceSample, sizes: Sizes, model: Model) -> str | None:
        """Return what its reader cannot take of a checked sample whose images have these (height,
        width); None: it takes the sample. Planning sets such samples aside."""
        return None

    def added_tokens(self, sample: SourceSample, grids: Grids, model: Model) -> int:
        """Return the tokens by which its reader makes a sample longer than measured, at most: plans
        leave room for them. `grids` of its media, (t, h, w) in patches."""
        return 0

    def stored_form(self, sample: SourceSample) -> SourceSample:
        """Return a sample as it will be read back."""
        return sample

    def members(self, task: ShardTask, samples: Sequence[PlannedSample]) -> list[Member]:
        """Return a pack's members: the media in order, unless the pack refers to them, and the
        JSON. Raises StageError if a sample changed since it was measured."""
        media, places = list[bytes](), list[Place]()
        subs, names = list[PackedSubSample](), list[str]()
        for one in samples:
            own, extensions = one.own(one.media), one.own(one.extensions)
            if task.refers:
                places += [place_of(task.sources[one.source_id], one, at) for at in own]
            else:
                media += task.read_media(one, own)
            subs.append(PackedSubSample(task.read_sample(one), extensions, one.num_tokens))
            names += extensions
        trees = [tree for tree in trees_of(samples) if tree.num_samples > 1]
        record = pack_json(
            subs, task.task, trees=trees, generation=task.generation, media=media, places=places
        )
        parts = media_part_names(names) if media else ()
        return [*zip(parts, media, strict=True), (JSON_PART, record)]

    def metadata(self, manifest: Manifest) -> dict[str, bytes]:
        """Return the files of .nv-meta that its reader takes instead of Energon's, by name."""
        return {}


def place_of(source: Source, sample: PlannedSample, at: Locator) -> Place:
    """Return the place of a sample's medium for its pack's JSON (`packs.stored_media`). Raises
    ChangedError if its file is gone, or is the medium alone and has another size than measured."""
    root, is_whole = source.media_root(at), at.kind == "file"
    time = 0  # of remote files
    if isinstance(root, MediaRoot):
        try:
            _, size, time = root.entry(at.container)
        except OSError as error:
            raise ChangedError(root.path(at.container), error.strerror) from error
        if is_whole and size != at.size:
            raise ChangedError(root.path(at.container))
    name, offset = ("files", None) if is_whole else ("tars", at.offset)
    return [f"{name}{sample.source_id}", at.container, offset, at.size, time]
