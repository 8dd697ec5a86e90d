"""The sub-samples of an Energon sample: those of a pack, or the one that an unpacked sample is."""

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.energon.errors import FatalSampleError
from PIL import Image

from task_encoders.energon_samples import PackedSample
from task_encoders.families import ModelOptions
from task_encoders.media.image import MAX_IMAGE_PIXELS, read_image_header
from task_encoders.media.video_file import MissingPyAVError, read_video_header
from task_encoders.packs.pack_format import match_images, restore_pack
from task_encoders.packs.tokenized import TokenizedText
from task_encoders.sample_encoder import EncodedSample, SampleEncoder, SampleLength
from task_encoders.samples import SampleError, SourceSample


class SubSample(NamedTuple):
    """One sample that is to be encoded."""

    key: str
    #: or why it cannot be used
    sample: SourceSample | SampleError
    #: the files, in the order of the sample's names
    images: tuple[bytes, ...] = ()
    videos: tuple[bytes, ...] = ()
    tokenized: TokenizedText | None = None
    #: as stored in its pack
    num_tokens: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of its media."""
        return sum(map(len, self.images + self.videos))


def sub_samples_of_pack(pack: PackedSample, task: str, made_with: str) -> list[SubSample]:
    """The sub-samples of a pack, in order.

    Args:
        task: what its sub-samples are.
        made_with: digest of the encoder's settings; token ids made with others are not used.

    Raises:
        PackFormatError: the pack's lists cannot be aligned.
    """
    record: dict[str, Any] = {
        "images": pack.image_names,
        "prompt": pack.prompts or [""] * len(pack.captions or ()),
        "captions": pack.captions,
        "meta": pack.meta,
    }
    if pack.video_names is not None:
        record["videos"] = pack.video_names
        if pack.image_names is None:
            del record["images"]
    restored = restore_pack(record, pack.__key__, task)
    matched = match_images(pack.image_names, pack.__key__.rpartition("/")[2], pack.images)
    images = {name: pack.images[member] for name, member in matched.items()}
    count = len(restored.keys)
    tokenized = restored.tokenized
    texts = tokenized.texts if tokenized and tokenized.made_with == made_with else [None] * count
    columns = restored.keys, restored.sub_samples, texts, restored.num_tokens or [None] * count
    found = []
    for key, sample, text, num_tokens in zip(*columns, strict=True):
        if isinstance(sample, SourceSample):
            try:
                of_sample = _files(sample.images, images), _files(sample.videos, pack.images)
                found.append(SubSample(key, sample, *of_sample, text, num_tokens))
                continue
            except SampleError as error:
                sample = error
        found.append(SubSample(key, sample))
    return found


def _files(names: tuple[str, ...], members: dict[str, Any]) -> tuple[bytes, ...]:
    missing = next((name for name in names if name not in members), None)
    if missing is not None:
        raise SampleError("missing_image", f"no member {missing!r}")
    return tuple(members[name] for name in names)


def measure(sub_sample: SubSample, encoder: SampleEncoder, model: ModelOptions) -> SampleLength:
    """What it will cost, from the headers of its media. Raises SampleError, FatalSampleError."""
    if isinstance(sub_sample.sample, SampleError):
        raise sub_sample.sample
    max_pixels = model.max_image_pixels or MAX_IMAGE_PIXELS
    limits = {"max_frame_pixels": max_pixels, "max_frames": model.max_video_frames}
    try:
        headers = [
            read_image_header(io.BytesIO(image), max_image_pixels=max_pixels)
            for image in sub_sample.images
        ]
        videos = [read_video_header(io.BytesIO(video), **limits) for video in sub_sample.videos]
    except MissingPyAVError as error:
        raise FatalSampleError(str(error)) from error
    sizes = [(header.height, header.width) for header in headers]
    return encoder.measure(sub_sample.sample, sizes, videos)


def decode_first(sub_sample: SubSample, encoder: SampleEncoder) -> tuple[Image.Image, ...]:
    """Its first image, if it has one: half of the work for most. Raises SampleError."""
    if isinstance(sub_sample.sample, SampleError):
        raise sub_sample.sample
    return tuple(map(encoder.decode_image, sub_sample.images[:1]))


def encode(
    sub_sample: SubSample,
    decoded: Sequence[Image.Image],
    encoder: SampleEncoder,
    *,
    check_length: bool,
) -> EncodedSample:
    """Its arrays.

    Args:
        decoded: the first of its images, any number of them.

    Raises:
        SampleError: it cannot be used.
        FatalSampleError: PyAV is missing; or its length is not the one stored in its pack.
    """
    if isinstance(sub_sample.sample, SampleError):
        raise sub_sample.sample
    key, sample, images, videos, tokenized, measured = sub_sample
    assert isinstance(sample, SourceSample)
    try:
        pictures: tuple[bytes | Image.Image, ...] = (*decoded, *images[len(decoded) :])
        encoded = encoder.encode(sample, pictures, videos, tokenized)
    except MissingPyAVError as error:
        raise FatalSampleError(str(error)) from error
    if check_length and measured not in (None, len(encoded.tokens)):
        raise FatalSampleError(
            f"sub-sample {key!r} has {len(encoded.tokens)} tokens but was measured with "
            f"{measured}; give the task encoder the processor and pixel limits of the folder's "
            "manifest.json"
        )
    return encoded
