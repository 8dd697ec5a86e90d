"""Processor time of measuring, against the physical floor.

    python tools/benchmarks/benchmark_measure.py [--num-samples 4000] [--rounds 7] [--folder DIR]
                                                 [--videos 4] [--processor] [--headers PICTURE]

JSON Lines of questions with answers, and pairs of a JPEG (0.75 to 3 megapixels) and a question,
with 460 bytes of English each, of Python's own manual. The first 4,096 records of each source and
its later records are timed apart, on one core, in one run:

    floor          only JSON with orjson, and each text with tiktoken; of pairs also opening the
                   two files, reading the record and the picture's first 16 KiB, and their hash
    measure        `offline-packing measure`, from files to a part of the index

The least of all rounds counts. Times are processor times: other work matters only as it takes the
processor's cache. To compare with another commit, run this file with PYTHONPATH set to its work
tree, in turns.

With --videos N, also N H.264 clips of 10 s at 640x360 and N WebM ones:

    header         frames, rate and size, as `measure` reads them
    libavformat    the same from PyAV, packets counted
    decode         the frames for training, as patches: the cost of a length without a header

With --processor, seconds for 100,000 texts, pairs and MP4 clips, and with transformers' processor.

With --instructions OUT, under valgrind, instructions in place of times, on which other work has no
influence; of the later records alone:

    valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file=OUT \
        python tools/benchmarks/benchmark_measure.py --instructions OUT --num-samples 512

With --headers, only headers of pictures of each kind (and those of the given files), as `measure`
reads them, against `Image.open` without the orientation.
"""

import argparse
import io
import itertools
import os
import re
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import orjson
import xxhash
from PIL import Image, PngImagePlugin

from offline_packing.config.packing import parse_config
from offline_packing.engines.local import LocalEngine
from offline_packing.index.measured import HASHED_BYTES
from offline_packing.index.table import open_table
from offline_packing.measure.measure import Measure
from offline_packing.measure.measure_part import MeasureTask, measure_part
from offline_packing.runs.run import Run, open_encoder
from offline_packing.sources import SourceRecord
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.media.image import read_image_header
from task_encoders.text.pieces import to_chat
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN_SPECIAL_TOKENS
from task_encoders.text.tokenizer import load_tokenizer

WORDS = " ".join(topics[name] for name in sorted(topics)).split()
#: Different pictures; the others are links to them.
NUM_PICTURES = 64
#: Records of a source that are all diagnosed.
NUM_FIRST = 4096


def draw_prose(rng: np.random.Generator) -> str:
    """40 to 81 words of the manual, one after another."""
    first, count = int(rng.integers(len(WORDS) - 100)), int(rng.integers(40, 82))
    return " ".join(WORDS[first : first + count])


def draw_pictures(seed: int = 0) -> list[bytes]:
    """Different JPEGs."""
    rng, files = np.random.default_rng(seed), []
    for megapixels in np.linspace(0.75, 3.0, NUM_PICTURES):
        aspect = rng.uniform(0.6, 1.7)
        height = int((megapixels * 1e6 / aspect) ** 0.5)
        small = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        picture, buffer = (
            Image.fromarray(small).resize((int(height * aspect), height), 3),
            io.BytesIO(),
        )
        picture.save(buffer, "JPEG", quality=92)
        files.append(buffer.getvalue())
    return files


def draw_pairs(folder: Path, files: list[bytes], count: int, ending: str = "jpg") -> None:
    """`count` pairs of a picture or a clip, one of `files` or a link to it, and a question with its
    answer."""
    folder.mkdir()
    rng, mark = np.random.default_rng(0), "<image>" if ending == "jpg" else "<video>"
    for i in range(count):
        messages = [
            {"role": "user", "content": f"{mark}\nDescribe picture {i}."},
            {"role": "assistant", "content": draw_prose(rng)},
        ]
        path = folder / f"{i:06d}.{ending}"
        if i < len(files):
            path.write_bytes(files[i])
        else:
            os.link(folder / f"{i % len(files):06d}.{ending}", path)
        path.with_suffix(".json").write_bytes(orjson.dumps({"messages": messages}))


def draw_texts(folder: Path, count: int, seed: int = 0) -> None:
    """`count` questions with their answers as JSON Lines."""
    rng = np.random.default_rng(seed)
    records = ({"question": f"What is {i}?", "answer": draw_prose(rng)} for i in range(count))
    (folder / "texts.jsonl").write_bytes(b"".join(orjson.dumps(one) + b"\n" for one in records))


def encode_alone() -> Callable[[str], list[int]]:
    """The tokenizer without anything around it."""
    return load_tokenizer("builtin")._encoding.encode_ordinary  # type: ignore[attr-defined]


def floor_of_pairs(folder: Path, first: int, end: int) -> None:
    """The least that any program must do: JSON, the text through tiktoken, and the beginning of the
    picture, which tells its size and which picture it is."""
    encode = encode_alone()
    for i in range(first, end):
        with open(folder / f"{i:06d}.json", "rb") as file:
            record = orjson.loads(file.read())
        with open(folder / f"{i:06d}.jpg", "rb", buffering=0) as picture:
            xxhash.xxh3_64_intdigest(picture.read(HASHED_BYTES))
        for message in record["messages"]:
            encode(message["content"])


def floor_of_texts(folder: Path, first: int, end: int) -> None:
    """The same for records in one file; lines before the first are only split off."""
    encode = encode_alone()
    with open(folder / "texts.jsonl", "rb") as file:
        for line in itertools.islice(file, first, end):
            record = orjson.loads(line)
            encode(record["question"])
            encode(record["answer"])


def tasks_of(source: dict[str, str], out: Path) -> Sequence[MeasureTask]:
    """The stage's own tasks: the first 4,096 records, and the others."""
    engine = {"samples_per_part": NUM_FIRST, "workers": 0}
    content = {"source": source, "engine": engine, "output": {"path": str(out)}}
    run = Run(parse_config(content), LocalEngine(0))
    for folder in (run.workspace.index, run.workspace.set_aside):
        folder.mkdir(parents=True)
    return [task.work for task in Measure(run).tasks()]


def seconds(function: Callable[[], object]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    function()
    return time.process_time() - start


def count_instructions(function: Callable[[], object], out: str) -> float:
    """Count the instructions of a second run, in millions. This process is under callgrind, which
    writes to `out`."""

    def control(*options: str) -> None:
        command = ["callgrind_control", *options, str(os.getpid())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    function()
    control("--instr=on")
    control("--zero")
    function()
    control("--dump")
    control("--instr=off")
    last = max(Path(out).parent.glob(f"{Path(out).name}.*"), key=os.path.getmtime)
    found = re.search(r"^totals: (\d+)", last.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1e6


def draw_video(container: str, codec: str, seed: int) -> bytes:
    """Ten seconds of a textured picture that moves."""
    import av

    rng = np.random.default_rng(seed)
    picture = rng.integers(0, 255, (45, 80, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for i in range(300):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 3 * i, 1), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return buffer.getvalue()


def benchmark_videos(count: int) -> None:
    """Print what the length of a video costs by header, by libavformat and by decoding."""
    from task_encoders.media import video_file

    encoder = build_sample_encoder()
    ways: dict[str, tuple[int, Callable[[bytes], object]]] = {
        "header": (100, lambda data: video_file.read_video_header(io.BytesIO(data))),
        "libavformat": (10, lambda data: video_file._ask_pyav(io.BytesIO(data), data[:12])),
        "decode": (1, encoder.encode_video),
    }
    for container, codec in (("mp4", "libx264"), ("webm", "libvpx-vp9")):
        files = [draw_video(container, codec, seed) for seed in range(count)]
        for label, (repeats, read) in ways.items():
            duration = seconds(lambda: [read(data) for data in files * repeats])  # noqa: B023
            each = duration / (count * repeats)
            print(f"{container:4s} {label:13s} {1 / each:10,.0f} videos/s  {1e6 * each:9,.0f} us")


def open_processor() -> Any:
    """Make transformers' processor of Qwen2-VL with the vocabulary and the template of measuring.
    It needs torchvision."""
    import dashscope
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    ranks = Path(dashscope.__file__).with_name("resources") / "qwen.tiktoken"
    fast = TikTokenConverter(str(ranks)).converted()
    fast.add_special_tokens([AddedToken(token, special=True) for token in QWEN_SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    image = Qwen2VLImageProcessor(min_pixels=3136, max_pixels=4_014_080)
    video = Qwen2VLVideoProcessor(do_sample_frames=False)
    return Qwen2VLProcessor(image, tokenizer, video, chat_template=QWEN2_VL_TEMPLATE)


def benchmark_processor(task: MeasureTask, label: str, count: int) -> None:
    """Print what the lengths of a part's samples cost here, and `count` of them through
    transformers' processor, which makes each sample. Both lengths are compared."""
    from transformers.video_utils import load_video

    processor, source = open_processor(), task.source
    given = {"temporal_patch_size": 2, "min_frames": 4, "max_frames": 768, "fps": 2.0}
    sample_frames = partial(processor.video_processor.sample_frames, **given)
    records = list(itertools.islice(source.records(task.part), count))

    def length(record: SourceRecord) -> int:
        sample, files = source.sample(record, record.key), dict[str, Any]()
        places = [source.open_media(record, name)[0].container for name in sample.media]
        paths = [*map(source.media.path, places)]
        if sample.images:
            files["images"] = [Image.open(path).convert("RGB") for path in paths]
        if sample.videos:
            clips = [load_video(path, sample_indices_fn=sample_frames) for path in paths]
            files["videos"], files["video_metadata"] = map(list, zip(*clips, strict=True))
        text = processor.apply_chat_template(to_chat(sample), tokenize=False).removesuffix("\n")
        return len(processor(text=[text], **files)["input_ids"][0])

    found = [length(record) for record in records]
    ours = min(seconds(lambda: measure_part(task)) for _ in range(3))
    with open_table(task.index_path) as table:
        measured = table.read(["num_tokens"])["num_tokens"].to_pylist()
    assert found == measured[:count], (label, found[:4], measured[:4])
    theirs = seconds(lambda: [length(record) for record in records])
    print(
        f"{label:8s} 100,000 samples: measure {1e5 * ours / len(measured):8,.1f} s, transformers' "
        f"processor {1e5 * theirs / count:9,.1f} s"
    )


def draw_kinds(folder: Path) -> dict[str, list[Path]]:
    """Files of pictures by kind: what cameras, editors, screenshots and phones write before and
    after the pixels."""
    rng = np.random.default_rng(0)
    small = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(small).resize((1280, 960), 3)
    exif = Image.Exif()
    exif.update({0x010F: "Maker", 0x0110: "Model of a camera", 0x0112: 6, 0x011A: 72.0})
    exif.update({0x011B: 72.0, 0x0128: 2, 0x0131: "Software 1.0", 0x0132: "2024:01:01 00:00:00"})
    xmp = b"<x:xmpmeta>" + b" " * 3000 + b'tiff:Orientation="6"</x:xmpmeta>'
    raw = exif.tobytes().hex()
    text = PngImagePlugin.PngInfo()
    text.add_text("Raw profile type exif", f"\nexif\n{len(raw) // 2:8}\n{raw}\n", zip=True)
    itxt = PngImagePlugin.PngInfo()
    itxt.add_itxt("XML:com.adobe.xmp", xmp)

    def file(image_format: str, image: Image.Image = picture, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, image_format, **options)
        return buffer.getvalue()

    def segment(marker: int, data: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data

    jpeg, png = file("JPEG", quality=90), file("PNG", compress_level=1)
    exif_segment = segment(0xE1, exif.tobytes())
    thumbnail = segment(0xE1, exif.tobytes() + bytes(rng.integers(0, 255, 9000, dtype=np.uint8)))
    photoshop = segment(
        0xED, b"Photoshop 3.0\x008BIM\x04\x04\0\0" + struct.pack(">I", 5000) + bytes(5000)
    )
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\1")
    xmp_segment = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)
    chunk = b"eXIf" + exif.tobytes()[6:]
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    kinds = {
        "JPEG": jpeg,
        "JPEG progressive": file("JPEG", progressive=True),
        "JPEG grey": file("JPEG", picture.convert("L")),
        "JPEG CMYK, Adobe": file("JPEG", picture.convert("CMYK")),
        "JPEG EXIF": jpeg[:2] + exif_segment + jpeg[2:],
        "JPEG EXIF, thumbnail": jpeg[:2] + thumbnail + jpeg[2:],
        "JPEG XMP": jpeg[:2] + xmp_segment + jpeg[2:],
        "JPEG Photoshop": jpeg[:2] + photoshop + jpeg[2:],
        "JPEG Adobe": jpeg[:2] + adobe + jpeg[2:],
        "JPEG ICC 3 kB": file("JPEG", icc_profile=bytes(3000)),
        "JPEG ICC 500 kB": file("JPEG", icc_profile=bytes(500_000)),
        "JPEG of an editor": jpeg[:2] + exif_segment + photoshop + xmp_segment + adobe + jpeg[2:],
        "JPEG, other bytes after it": jpeg + bytes(100_000),
        "PNG": png,
        "PNG palette": file("PNG", picture.quantize(64), transparency=3),
        "PNG 100x75": file("PNG", picture.resize((100, 75))),
        "PNG ICC": file("PNG", icc_profile=small.tobytes()),
        "PNG eXIf": file("PNG", exif=exif),
        "PNG eXIf after the pixels": png[:-12] + late + png[-12:],
        "PNG XMP": file("PNG", pnginfo=itxt),
        "PNG raw EXIF": file("PNG", pnginfo=text),
    }
    several = {"save_all": True, "append_images": [picture.resize((320, 240))]}
    stereo, second = file("MPO", **several), file("JPEG", picture.resize((320, 240)))
    gain = file("MPO", xmp=b'<rdf:Description hdrgm:Version="1.0"/>', **several)
    clip, trailer = b"\0\0\0\x18ftypmp42" + bytes(1_000_000), b"SEFT" * 1000
    phones = {  # an MPF segment, second pictures, and other bytes after them
        "JPEG MPF": stereo,
        "JPEG MPF, trailer": stereo + trailer,
        "JPEG gain map": gain,
        "JPEG gain map, clip": gain + clip,
        "JPEG, clip": jpeg + clip,
        "JPEG, second, trailer": jpeg + second + trailer,
        "JPEG MPF EXIF, trailer": stereo[:2] + exif_segment + stereo[2:] + trailer,
    }
    paths: dict[str, list[Path]] = {}
    for number, (kind, data) in enumerate((kinds | phones).items()):
        path = folder / f"{number}.kind"
        path.write_bytes(data)
        paths.setdefault("JPEG of phones, seven forms" if kind in phones else kind, []).append(path)
    return paths


def benchmark_headers(kinds: Mapping[str, Sequence[Path]], rounds: int) -> None:
    """Print what the headers of pictures cost, and what opening them with Pillow does."""

    def ours(paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("rb") as file:
                read_image_header(file)

    def pillow(paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("rb") as file, Image.open(file) as image:
                assert image.size

    for kind, paths in kinds.items():
        many = list(paths) * max(1, 200 // len(paths))
        ours(many)
        pillow(many)
        times = [
            (seconds(partial(ours, many)), seconds(partial(pillow, many))) for _ in range(rounds)
        ]
        own, other = (1e6 * min(one) / len(many) for one in zip(*times, strict=True))
        print(f"{kind:28s} header {own:6.1f} us, Pillow {other:6.1f} us, {own / other:.2f} in time")


def benchmark_floor(
    label: str,
    tasks: Sequence[MeasureTask],
    floor: Callable[[int, int], None],
    rounds: int,
    out: str | None,
) -> None:
    """Print the cost of measuring against the floor, for the first records and for later ones."""
    ends = np.cumsum([0, *(task.part.num_records or 0 for task in tasks)]).tolist()
    if out is not None:
        first, end = ends[1:3]
        least = count_instructions(lambda: floor(first, end), out) * 1e3 / (end - first)
        ours = count_instructions(lambda: measure_part(tasks[1]), out) * 1e3 / (end - first)
        print(
            f"{label:8s} {end - first:,} records: measure {ours:,.0f},000 instructions, floor "
            f"{least:,.0f},000, {ours / least:.2f}"
        )
        return
    for task, first, end, which in zip(tasks, ends, ends[1:], ("first", "others"), strict=False):
        times = []
        for _ in range(rounds + 1):
            least = seconds(lambda: floor(first, end))  # noqa: B023
            times.append((least, seconds(lambda: measure_part(task))))  # noqa: B023
        least, ours = (1e6 * min(one) / (end - first) for one in zip(*times[1:], strict=True))
        print(
            f"{label:8s} {which:6s} {end - first:,} records: measure {ours:6.1f} us, floor "
            f"{least:6.1f} us, {ours / least:.2f} in time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=4000, help="after the first 4,096")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to draw the data (default: temporary)")
    parser.add_argument("--videos", type=int, default=0, help="also this many videos of each kind")
    parser.add_argument("--processor", action="store_true", help="against transformers' processor")
    parser.add_argument("--instructions", metavar="OUT", help="see above")
    parser.add_argument("--headers", type=Path, nargs="*", help="headers only, and of these files")
    arguments = parser.parse_args()
    if arguments.headers is not None:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            kinds = draw_kinds(Path(name))
            for path in arguments.headers:
                kinds.setdefault(f"{path.suffix} files", []).append(path)
            benchmark_headers(kinds, arguments.rounds)
        return
    if arguments.videos:
        benchmark_videos(arguments.videos)
    count = NUM_FIRST + arguments.num_samples
    open_encoder(model_options())
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        draw_texts(folder, count)
        pairs, clips = folder / "pairs", folder / "clips"
        draw_pairs(pairs, draw_pictures(), count)
        texts = {"format": "jsonl", "path": str(folder / "texts.jsonl"), "task": "bmr"}
        pictures = {"format": "pairs", "path": str(pairs), "task": "vqa"}
        if arguments.processor:
            draw_pairs(clips, [draw_video("mp4", "libx264", seed) for seed in range(4)], 64, "mp4")
            sources = {"texts": (texts, 1000), "pictures": (pictures, 64)}
            sources["videos"] = ({**pictures, "path": str(clips)}, 8)
            for label, (source, some) in sources.items():
                benchmark_processor(tasks_of(source, folder / f"out_{label}")[0], label, some)
            return
        how = arguments.rounds, arguments.instructions
        tasks = tasks_of(texts, folder / "out_texts")
        benchmark_floor("texts", tasks, partial(floor_of_texts, folder), *how)
        tasks = tasks_of(pictures, folder / "out_pairs")
        benchmark_floor("pictures", tasks, partial(floor_of_pairs, pairs), *how)


if __name__ == "__main__":
    main()
