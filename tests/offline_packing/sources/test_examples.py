"""The configurations in examples/, run as they are over records of each dataset's form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.config.packing import load_config
from offline_packing.measure.measure import measure
from tests.helpers.datasets import image_bytes, make_run
from tests.helpers.formats import lines, write_file

EXAMPLES = Path(__file__).parents[3] / "examples"
IMAGE = image_bytes(112, 84)


def talk(question: str, *, turns: int = 1) -> list[dict[str, str]]:
    """A dialogue of LLaVA's form."""
    asked = [{"from": "human", "value": question}, {"from": "gpt", "value": "A red square."}]
    return asked + [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "It is."}] * (
        turns - 1
    )


def write_dialogues(path: str, image_root: str, *, as_lines: bool = False) -> None:
    """A record with an image, one of several turns with the same id, and one without an image."""
    write_file(Path(image_root) / "coco" / "9.jpg", IMAGE)
    records = [
        {"id": "9", "image": "coco/9.jpg", "conversations": talk("<image>\nWhat is it?")},
        {"id": "9", "image": "coco/9.jpg", "conversations": talk("What?\n<image>", turns=2)},
        {"id": "t", "conversations": talk("Say something."), "source": "text.json"},
    ]
    write_file(Path(path), lines(records) if as_lines else orjson.dumps(records))


def write_table(folder: str, rows: list[dict[str, Any]]) -> None:
    Path(folder).mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), Path(folder) / "train-00000-of-00001.parquet")


def medium(name: str | None = None) -> dict[str, Any]:
    return {"bytes": IMAGE, "path": name}


def llava_pretrain() -> None:
    folder = Path("data/llava_pretrain")
    write_file(folder / "images" / "00453" / "004539375.jpg", IMAGE)
    talks = (talk("Render a clear summary.\n<image>"), talk("<image>\nWrite a terse summary."))
    records = [
        {"id": i, "image": "00453/004539375.jpg", "conversations": t} for i, t in enumerate(talks)
    ]
    write_file(folder / "blip_laion_cc_sbu_558k.json", orjson.dumps(records))


def onevision() -> None:
    rows = [
        {"id": "a-0", "image": medium("0.png"), "conversations": talk("<image>\nWhich?")},
        {"id": "a-1", "image": medium(), "conversations": talk("<image>\nWhich?", turns=3)},
    ]
    write_table(
        "data/onevision/ai2d(cauldron,llava_format)", [{**r, "data_source": "a"} for r in rows]
    )
    text = [{"id": "m", "image": None, "conversations": talk("Say it."), "data_source": "m"}]
    write_table("data/onevision/magpie_pro", text)


def finevision() -> None:
    rated = {"source": "ai2d", "relevance_ratings": [4, 5], "relevance_min": 4}
    texts = [{"user": "What is it?", "assistant": "A."}, {"user": "Why?", "assistant": "So."}]
    rows = [
        {"images": [medium(), medium()], "texts": texts},
        {"images": [medium()], "texts": texts[:1]},
    ]
    write_table("data/finevision/ai2d_merged", [{**row, **rated} for row in rows])


def cauldron() -> None:
    texts = [
        {"user": "Question: What?\nChoices:\nA. x", "assistant": "Answer: A", "source": "AI2D"}
    ]
    write_table("data/the_cauldron/ai2d", [{"images": [medium()], "texts": texts * 2}])
    write_table("data/the_cauldron/nlvr2", [{"images": [medium(), medium()], "texts": texts}])


def asked(folder: str, name: str, image: str, *, more: dict[str, Any] | None = None) -> None:
    """Three questions about one picture, one of them twice."""
    write_file(Path(folder) / image, IMAGE)
    texts = [{"question": f"What {i % 3}?", "answer": "A red square."} for i in range(4)]
    records = [{"id": i, "image": image, **text, **(more or {})} for i, text in enumerate(texts)]
    write_file(Path(name), lines(records))


#: Example -> what writes its data, and how many samples, images and turns there are.
CASES: dict[str, tuple[Callable[[], None], tuple[int, int, int]]] = {
    "llava_instruct": (
        lambda: write_dialogues("data/llava/llava_v1_5_mix665k.json", "data/llava/images"),
        (3, 2, 4),
    ),
    "llava_pretrain_558k": (llava_pretrain, (2, 2, 2)),
    "sharegpt4v": (
        lambda: write_dialogues(
            "data/sharegpt4v/sharegpt4v_instruct_gpt4-vision_cap100k.json", "data/sharegpt4v/images"
        ),
        (3, 2, 4),
    ),
    "llava_onevision_data": (onevision, (3, 2, 5)),
    "cambrian": (
        lambda: write_dialogues(
            "data/cambrian/Cambrian7M_withsystemprompt.jsonl", "data/cambrian", as_lines=True
        ),
        (3, 2, 4),
    ),
    "finevision": (finevision, (2, 3, 3)),
    "the_cauldron": (cauldron, (2, 3, 3)),
    "docvqa_splits": (
        lambda: asked(
            "data/docvqa",
            "data/docvqa/questions.jsonl",
            "documents/a_1.png",
            more={"ucsf_document_id": "a"},
        ),
        (4, 4, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_reads_its_dataset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write, expected = CASES[name]
    write()
    config = load_config(EXAMPLES / f"{name}.yaml", ["engine.workers=0"])
    sources = [source.model_dump() for source in config.source]
    run = make_run(sources, tmp_path / "out", pack={"seq_length": 4096})
    index = measure(run)
    assert (index.info.set_aside, index.info.lost) == ({}, {})
    table = index.table("num_images", "num_turns")
    counts = (sum(table["num_images"].to_pylist()), sum(table["num_turns"].to_pylist()))
    assert (len(table), *counts) == expected


def test_every_example_can_be_parsed() -> None:
    paths = sorted(EXAMPLES.glob("*.yaml"))
    assert {path.stem for path in paths} >= CASES.keys()
    assert all(load_config(path).source for path in paths)
