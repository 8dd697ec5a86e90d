"""Speed of measuring, against transformers' image processor and against the physical floor.

    python tools/benchmarks/benchmark_measure.py [--num-samples 2000] [--folder DIR] [--videos 4]

The same JPEG and text pairs (0.75 to 3 megapixels, about 1.2 kB of text), on one core, in one run:

    transformers   the model's image processor and tokenizer, for the length alone
    floor          only image headers with Pillow, JSON with orjson, text with tiktoken
    measure        what `offline-packing measure` does, from files to a part of the index

Times are processor times: other work on the machine does not count. Every length of
`measure` is compared with transformers'.

With --videos N, also on N H.264 clips of 10 s at 640x360 and N WebM ones:

    header         frames, rate and size, as `measure` reads them
    libavformat    the same from PyAV, packets counted
    decode         the frames for training, as patches: what a length costs without a header
"""

import argparse
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import orjson
import pyarrow.parquet as pq
from PIL import Image

from offline_packing.measure.measure_part import MeasureTask, measure_part
from offline_packing.runs.run import open_encoder
from offline_packing.sources import open_source
from task_encoders.families import build_sample_encoder, model_options
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.text.load_tokenizer import load_tokenizer

WORDS = (
    "a photo of two red bicycles leaning on the old stone bridge while it rains , 3 birds".split()
)
#: Different pictures; files share them, as drawing and encoding takes most of the time.
NUM_PICTURES = 64
ROUNDS = 7


def draw_pairs(folder: Path, count: int, seed: int = 0) -> None:
    """`count` pairs of a JPEG and a question with its answer."""
    rng = np.random.default_rng(seed)
    pictures = []
    for megapixels in np.linspace(0.75, 3.0, NUM_PICTURES):
        aspect = rng.uniform(0.6, 1.7)
        height = int((megapixels * 1e6 / aspect) ** 0.5)
        small = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        picture = Image.fromarray(small).resize((int(height * aspect), height), 3)
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=92)
        pictures.append(buffer.getvalue())
    for i in range(count):
        answer = " ".join(rng.choice(WORDS, rng.integers(150, 350)))
        messages = [
            {"role": "user", "content": f"<image>\nDescribe picture {i}."},
            {"role": "assistant", "content": answer},
        ]
        (folder / f"{i:06d}.jpg").write_bytes(pictures[i % NUM_PICTURES])
        (folder / f"{i:06d}.json").write_bytes(orjson.dumps({"messages": messages}))


def run_transformers(folder: Path, count: int, processor: object) -> list[int]:
    """Lengths by transformers' processor; the newline after the end token is not trained."""
    lengths = []
    for i in range(count):
        record = orjson.loads((folder / f"{i:06d}.json").read_bytes())
        question, answer = (message["content"] for message in record["messages"])
        with Image.open(folder / f"{i:06d}.jpg") as image:
            grid = processor.image_processor(image.convert("RGB"))["image_grid_thw"][0]
        pads = "<|image_pad|>" * int(np.prod(grid) // 4)
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{question.replace('<image>', f'<|vision_start|>{pads}<|vision_end|>')}<|im_end|>\n"
            f"<|im_start|>assistant\n{answer}<|im_end|>"
        )
        lengths.append(len(processor.tokenizer(text)["input_ids"]))
    return lengths


def run_floor(folder: Path, count: int) -> int:
    """The least that any program must do: headers, JSON, and the text through tiktoken."""
    encode = load_tokenizer("builtin")._encoding.encode_ordinary  # type: ignore[attr-defined]
    total = 0
    for i in range(count):
        with open(folder / f"{i:06d}.json", "rb") as file:
            record = orjson.loads(file.read())
        with Image.open(folder / f"{i:06d}.jpg") as image:
            total += image.width * image.height
        for message in record["messages"]:
            total += len(encode(message["content"]))
    return total


def run_measure(folder: Path, out: Path) -> list[int]:
    """The real stage in this process: one task from scan to a part of the index."""
    source = open_source({"format": "pairs", "path": str(folder), "task": "vqa"})
    (part,) = source.scan(1 << 30).parts
    model = model_options()
    index_path = out / "index.parquet"
    measure_part(MeasureTask(0, source, 0, part, model, index_path, out / "set_aside.parquet"))
    return pq.read_table(index_path, columns=["num_tokens"])["num_tokens"].to_pylist()


def seconds(function: Callable[[], object]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    function()
    return time.process_time() - start


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where to draw the data (default: temporary)")
    parser.add_argument("--videos", type=int, default=0, help="also this many videos of each kind")
    arguments = parser.parse_args()
    if arguments.videos:
        benchmark_videos(arguments.videos)
    count = arguments.num_samples
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        data, out = Path(name, "data"), Path(name, "out")
        data.mkdir()
        out.mkdir()
        draw_pairs(data, count)
        open_encoder(model_options())
        limits = model_options()
        processor = builtin_processor(min_pixels=limits.min_pixels, max_pixels=limits.max_pixels)
        run_floor(data, min(count, 100))  # files and code into memory
        run_measure(data, out)
        # In turns, so that a busy neighbour slows both; the round with the median ratio counts.
        rounds = [
            (seconds(lambda: run_floor(data, count)), seconds(lambda: run_measure(data, out)))
            for _ in range(ROUNDS)
        ]
        floor, ours = sorted(rounds, key=lambda times: times[1] / times[0])[ROUNDS // 2]
        start = time.process_time()
        expected = run_transformers(data, count, processor)
        theirs = time.process_time() - start
        lengths = run_measure(data, out)
    different = sum(a != b for a, b in zip(lengths, expected, strict=True))
    for label, duration in (("transformers", theirs), ("floor", floor), ("measure", ours)):
        print(f"{label:13s} {count / duration:10,.0f} samples/s  {1e6 * duration / count:9,.0f} us")
    print(f"measure / transformers {theirs / ours:.0f}x (wanted: >= 100)")
    print(f"measure / floor        {ours / floor:.2f} in time (wanted: <= 1.5)")
    print(f"different lengths      {different} of {count} (wanted: 0)")


if __name__ == "__main__":
    main()
