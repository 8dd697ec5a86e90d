"""The configurations in examples/, run as they are on records in each data set's published form,
and those of `init`. Each writer names the page that publishes the form."""

import json
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from offline_packing.cli.starter import render_config
from offline_packing.config.packing import PackingConfig, load_config, parse_config
from offline_packing.runs.set_aside import list_set_aside
from offline_packing.sources.recognise import recognise
from offline_packing.verify.verify import verify
from task_encoders.text.pieces import place_media
from tests.helpers.datasets import image_bytes, make_run, outcomes, pack_all
from tests.helpers.formats import lines, write_file
from tests.helpers.outputs import samples_of
from tests.helpers.videos import make_video

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = [image_bytes(56 + 28 * i, 84) for i in range(4)]

#: A sample: its texts, prompts and answers in turn, and its pictures by number.
Sample = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """A data set on disk: what is to be packed of it, and why the rest is not."""

    samples: list[Sample]
    #: what `init` is given
    init: str
    #: number of records set aside by reason
    aside: dict[str, int] = field(default_factory=dict)
    #: samples that the configuration of `init` packs, if not those of the example
    init_samples: list[Sample] | None = None
    init_aside: dict[str, int] | None = None


def talk(*texts: str) -> list[dict[str, str]]:
    """A dialogue of LLaVA's form."""
    roles = ("human", "gpt")
    return [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]


def write_pictures(folder: str, *names: str) -> None:
    for i, name in enumerate(names):
        write_file(Path(folder) / name, PICTURES[i])


def write_table(folder: str, rows: list[dict[str, Any]], name: str = "train") -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), Path(folder) / f"{name}-00000-of-00001.parquet")


def medium(number: int, name: str | None = None) -> dict[str, Any]:
    """A cell of `datasets.Image`."""
    return {"bytes": PICTURES[number], "path": name}


def llava_pretrain_558k() -> Written:
    """https://huggingface.co/datasets/liuhaotian/LLaVA-Pretrain"""
    names = ["00453/004539375.jpg", "00239/002394305.jpg"]
    write_pictures("data/llava_pretrain/images", *names)
    asked = ("Render a clear and concise summary of the photo.\n<image>", "<image>\nWhat is this?")
    said = ("select luxury furniture 3 - inch gel memory foam", "a grey watch with an army style")
    records = [
        {"id": Path(name).stem, "image": name, "conversations": talk(*turn)}
        for name, *turn in zip(names, asked, said, strict=True)
    ]
    path = "data/llava_pretrain/blip_laion_cc_sbu_558k.json"
    write_file(Path(path), orjson.dumps(records))
    samples = [(("", f"<image>{text}"), (i,)) for i, text in enumerate(said)]
    shown = [((asked[i], text), (i,)) for i, text in enumerate(said)]
    return Written(samples, path, init_samples=shown)


def dialogues(path: str, image_root: str, *names: str, as_lines: bool = False) -> Written:
    """Dialogues of LLaVA: with one id twice, with a picture in a later line, and without one."""
    write_pictures(image_root, *names)
    records = [
        {"id": "9", "image": names[0], "conversations": talk("<image>\nWhat is it?", "A.")},
        {"id": "9", "image": names[1], "conversations": talk("What?\n<image>", "B.", "Why?", "C.")},
        {"id": "wgByO4Y_0", "model": "", "conversations": talk("Say something.", "D.")},
    ]
    write_file(Path(path), lines(records) if as_lines else orjson.dumps(records))
    samples: list[Sample] = [
        (("<image>\nWhat is it?", "A."), (0,)),
        (("What?\n<image>", "B.", "Why?", "C."), (1,)),
        (("Say something.", "D."), ()),
    ]
    return Written(samples, path)


def llava_instruct() -> Written:
    """https://huggingface.co/datasets/liuhaotian/LLaVA-Instruct-150K"""
    names = ("coco/train2017/000000033471.jpg", "ocr_vqa/images/013987.jpg")
    return dialogues("data/llava/llava_v1_5_mix665k.json", "data/llava/images", *names)


def sharegpt4v() -> Written:
    """https://huggingface.co/datasets/Lin-Chen/ShareGPT4V"""
    path = "data/sharegpt4v/sharegpt4v_instruct_gpt4-vision_cap100k.json"
    names = ("coco/train2017/000000000009.jpg", "sam/images/sa_545504.jpg")
    return dialogues(path, "data/sharegpt4v/images", *names)


def cambrian() -> Written:
    """https://huggingface.co/datasets/nyu-visionx/Cambrian-10M"""
    path = "data/cambrian/Cambrian7M_withsystemprompt.jsonl"
    names = ("coco/train2017/9.jpg", "gqa/images/1.jpg")
    return dialogues(path, "data/cambrian", *names, as_lines=True)


def llava_onevision_data() -> Written:
    """https://huggingface.co/datasets/lmms-lab/LLaVA-OneVision-Data"""
    folder = "data/onevision/ai2d(cauldron,llava_format)"
    own = {"data_source": "ai2d"}
    rows = [
        {"id": "a-0", "image": medium(0, "0.png"), "conversations": talk("<image>\nWhich?", "A.")},
        {"id": "a-1", "image": medium(1), "conversations": talk("<image>\nWhich?", "B.")},
    ]
    write_table(folder, [row | own for row in rows])
    text = {"id": "m", "image": None, "conversations": talk("Say it.", "C."), "data_source": "m"}
    write_table("data/onevision/magpie_pro", [text])
    pictured: list[Sample] = [(("<image>\nWhich?", "AB"[i] + "."), (i,)) for i in range(2)]
    return Written([*pictured, (("Say it.", "C."), ())], folder, init_samples=pictured)


def finevision() -> Written:
    """https://huggingface.co/datasets/HuggingFaceM4/FineVision"""
    rated: dict[str, Any] = {"source": "ai2d"}
    for name in ("relevance", "image_correspondence", "formatting", "visual_dependency"):
        rated |= {f"{name}_ratings": [4, 5], f"{name}_min": 4}
    texts = [{"user": "What is it?", "assistant": "A."}, {"user": "Why?", "assistant": "So."}]
    rows = [
        {"images": [medium(0), medium(1)], "texts": texts},
        {"images": [medium(2)], "texts": texts[:1]},
    ]
    write_table("data/finevision/ai2d_merged", [{**row, **rated} for row in rows])
    samples: list[Sample] = [
        (("<image><image>What is it?", "A.", "Why?", "So."), (0, 1)),
        (("<image>What is it?", "A."), (2,)),
    ]
    return Written(samples, "data/finevision/ai2d_merged")


def the_cauldron() -> Written:
    """https://huggingface.co/datasets/HuggingFaceM4/the_cauldron"""
    asked, said = "Question: What?\nChoices:\nA. x", "Answer: A"
    texts = [{"user": asked, "assistant": said, "source": "AI2D"}]
    write_table("data/the_cauldron/ai2d", [{"images": [medium(0)], "texts": texts * 2}])
    write_table("data/the_cauldron/nlvr2", [{"images": [medium(1), medium(2)], "texts": texts}])
    one: Sample = (("<image>" + asked, said, asked, said), (0,))
    two: Sample = (("<image><image>" + asked, said), (1, 2))
    return Written([one, two], "data/the_cauldron")


def vqav2_rows() -> list[dict[str, Any]]:
    """Annotations of two questions about one picture, of ten people each."""
    asked = {"Where is he looking?": ["down"] * 7 + ["at table"] * 3, "How many?": ["2"] * 10}
    rows = []
    for number, (question, answers) in enumerate(asked.items()):
        given = [
            {"answer": answer, "answer_confidence": "yes", "answer_id": i + 1}
            for i, answer in enumerate(answers)
        ]
        row = {"question_type": "none of the above", "multiple_choice_answer": answers[0]}
        row |= {"answers": given, "image_id": 458752, "answer_type": "other"}
        rows.append({**row, "question_id": 458752000 + number, "question": question})
    return rows


VQAV2: list[Sample] = [
    (("<image>Where is he looking?", "down"), (0,)),
    (("<image>How many?", "2"), (0,)),
]


def vqav2() -> Written:
    """https://huggingface.co/datasets/lmms-lab/VQAv2"""
    rows = [{**row, "image": medium(0)} for row in vqav2_rows()]
    write_table("data/vqav2/data", rows, "validation")
    # `answers` are objects with several texts: a message of `init` names the field to choose.
    return Written(VQAV2, "data/vqav2/data", init_samples=[], init_aside={"bad_record": 2})


def vqav2_official() -> Written:
    """https://visualqa.org/download.html: the files' forms are described there."""
    head = {"info": {"year": 2017, "version": "2.0"}, "data_type": "mscoco"}
    head |= {"data_subtype": "train2014", "license": {"url": "http://…", "name": "CC 4.0"}}
    asked = ("image_id", "question", "question_id")
    questions = [{name: row[name] for name in asked} for row in vqav2_rows()]
    annotations = [{n: v for n, v in row.items() if n != "question"} for row in vqav2_rows()]
    files = {"questions": questions, "annotations": annotations}
    paths = [f"data/vqav2/v2_{name}.json" for name in files]
    for path, (name, rows) in zip(paths, files.items(), strict=True):
        write_file(Path(path), orjson.dumps({**head, name: rows, "task_type": "Open-Ended"}))
    write_pictures("data/coco", "train2014/COCO_train2014_000000458752.jpg")
    run_script("join_vqav2.py", *paths, "data/vqav2/train.jsonl")
    return Written(VQAV2, "data/vqav2/train.jsonl")


def docvqa_rows() -> list[dict[str, Any]]:
    rows = [
        {"questionId": 337, "question": "what is the date?", "answers": ["1/8/93"]},
        {"questionId": 338, "question": "what is the contact?", "answers": ["P. Carter", "Carter"]},
    ]
    more: dict[str, Any] = {"docId": 279, "question_types": ["handwritten", "form"]}
    more |= {"ucsf_document_id": "xnbl0037", "ucsf_document_page_no": "1", "data_split": "train"}
    return [row | more for row in rows]


DOCVQA: list[Sample] = [
    (("<image>what is the date?", "1/8/93"), (0,)),
    (("<image>what is the contact?", "P. Carter"), (0,)),
]


def docvqa() -> Written:
    """https://huggingface.co/datasets/HuggingFaceM4/DocumentVQA"""
    write_table("data/docvqa_hub/data", [{**row, "image": medium(0)} for row in docvqa_rows()])
    return Written(DOCVQA, "data/docvqa_hub/data")


def docvqa_splits() -> Written:
    """https://www.docvqa.org/datasets/docvqa (train_v1.0_withQT.json)"""
    write_pictures("data/docvqa", "documents/xnbl0037_1.png")
    rows = [{**row, "image": "documents/xnbl0037_1.png"} for row in docvqa_rows()]
    head = {"dataset_name": "SP-DocVQA", "dataset_split": "train", "dataset_version": "1.0"}
    path = "data/docvqa/train_v1.0_withQT.json"
    write_file(Path(path), json.dumps({**head, "data": rows}, indent=2).encode())
    return Written(DOCVQA, path)


def run_script(name: str, *arguments: str) -> None:
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def obelics() -> Written:
    """https://huggingface.co/datasets/HuggingFaceM4/OBELICS, and the files of img2dataset."""
    address = "http://a.b/{}.jpg".format
    rows = [
        {"images": [None, address(0), None], "texts": ["Intro.", None, "End."]},
        {"images": [address(1), None, address(9)], "texts": [None, "Two.", None]},
        {"images": [address(9)], "texts": [None]},
    ]
    more = {"metadata": "[null]", "general_metadata": '{"url": "http://a.b"}'}
    write_table("data/obelics/data", [{**row, **more} for row in rows])
    run_script("obelics.py", "urls", "data/obelics/data", "data/obelics/urls.txt")
    asked = Path("data/obelics/urls.txt").read_text().split()
    assert asked == [address(0), address(1), address(9)]
    write_pictures("data/obelics/images/00000", "000000000.jpg", "000000001.jpg")
    states = ["success", "success", "failed_to_download"]
    report = [
        {"url": url, "key": f"{i:09}", "status": state, "error_message": None, "width": 56}
        for i, (url, state) in enumerate(zip(asked, states, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(report), "data/obelics/images/00000.parquet")
    paths = ("data/obelics/data", "data/obelics/images", "data/obelics/train.jsonl")
    run_script("obelics.py", "records", *paths)
    samples: list[Sample] = [(("", "Intro.<image>End."), (0,)), (("", "<image>Two."), (1,))]
    return Written(samples, "data/obelics/train.jsonl")


def mmc4() -> Written:
    """https://github.com/allenai/mmc4: README.md"""

    def picture(name: str, before: int) -> dict[str, Any]:
        url = {"face_detections": None, "raw_url": f"http://a.b/{name}", "matched_sim": 0.3}
        return {**url, "image_name": name, "matched_text_index": before}

    pictured = [
        [picture("b9040a0dbb22.jpg", 1), picture("db1c21bc8474.jpg", 0)],
        [picture("000000000000.jpg", 0)],
    ]
    more = {"url": "http://a.b", "could_have_url_duplicate": 0, "similarity_matrix": [[0.2, 0.3]]}
    texts = ["Lock the door.", "Press the switch."]
    records = [{"image_info": one, "text_list": texts, **more} for one in pictured]
    write_file(Path("data/mmc4/docs_no_face_shard_0_v3.jsonl"), lines(records))
    write_pictures("data/mmc4/images", "db1c21bc8474.jpg", "b9040a0dbb22.jpg")
    sample: Sample = (("", "<image>Lock the door. <image>Press the switch."), (0, 1))
    return Written([sample], "data/mmc4", {"missing_image": 1})


def llava_video_178k() -> Written:
    """https://huggingface.co/datasets/lmms-lab/LLaVA-Video-178K"""
    folder = "data/LLaVA-Video-178K/0_30_s_academic_v0_1"
    clip = "academic_source/Charades/AMXUC.mp4"
    write_file(Path(folder) / clip, make_video(8))
    asked = "<image>\nPlease describe the video in detail."
    record = {"id": "AMXUC", "conversations": talk(asked, "A bar moves."), "video": clip}
    path = f"{folder}/0_30_s_academic_v0_1_cap_processed.json"
    write_file(Path(path), orjson.dumps([record | {"data_source": "0_30_s_academic_v0_1"}]))
    return Written([((asked.replace("<image>", "<video>"), "A bar moves."), (-1,))], path)


#: By the names of their examples.
WRITERS: dict[str, Callable[[], Written]] = {
    write.__name__: write
    for write in (
        *(llava_pretrain_558k, llava_instruct, sharegpt4v, cambrian, llava_onevision_data),
        *(finevision, the_cauldron, vqav2, vqav2_official, docvqa, docvqa_splits),
        *(obelics, mmc4, llava_video_178k),
    )
}


def check_packs(
    config: PackingConfig, output: Path, samples: list[Sample], aside: dict[str, int]
) -> None:
    """Every record is packed with its texts and pictures, or set aside for a known reason."""
    sources = [source.model_dump() for source in config.source]
    pack = config.pack.model_dump(exclude_unset=True) | {"seq_length": 2048, "max_set_aside": 1}
    run = make_run(sources, output, pack=pack, model=config.model.model_dump())
    found = Counter(outcomes(run).values())
    assert found == Counter(aside) + Counter(ok=len(samples)), list(list_set_aside(run))
    if samples:
        pack_all(run)
        assert verify(run, deep=True).problems == []
    packed: list[Sample] = []
    for _, sample, media in samples_of(run):
        texts = [text for turn in place_media(sample) for text in (turn.prompt, turn.answer)]
        texts = ["", texts[1]] if sample.task == "captioning" else texts  # shows no prompt
        numbers = tuple(PICTURES.index(one) if one in PICTURES else -1 for one in media)
        packed.append((tuple(texts), numbers))
    assert sorted(packed) == sorted(samples)


@pytest.mark.parametrize("name", WRITERS)
def test_a_data_set_from_its_files_to_packs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = WRITERS[name]()
    config = load_config(EXAMPLES / f"{name}.yaml", ["engine.workers=0"])
    check_packs(config, tmp_path / "out", written.samples, written.aside)
    found = recognise(written.init)
    if name == "vqav2":  # which of the answers is trained
        assert "source.fields={answer:" in found.examples[0].problem
    config = parse_config(yaml.safe_load(render_config(found, "init")))
    init_samples = written.samples if written.init_samples is None else written.init_samples
    init_aside = written.aside if written.init_aside is None else written.init_aside
    check_packs(config, tmp_path / "init", init_samples, init_aside)


def test_every_example_can_be_parsed() -> None:
    paths = sorted(EXAMPLES.glob("*.yaml"))
    assert {path.stem for path in paths} >= WRITERS.keys()
    assert all(load_config(path).source for path in paths)
