"""What is packed to test the laws that hold for all of it: a scenario is a source, a configuration,
and what is expected of it.

    SCENARIOS["padding"] = Scenario("bmr", pack(pad_multiple=16), Expected(30, check=padded))

`tests/laws` runs every law over every scenario. A new feature gets one scenario here, and tests of
its own algorithm beside its module.
"""

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.run import Run
from task_encoders.families import FAMILIES
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.packs.pack import RestoredPack, restore_pack
from task_encoders.samples import SourceSample
from tests.helpers import formats
from tests.helpers.datasets import (
    WORDS,
    captioning_pairs,
    dialogue,
    image_bytes,
    make_run,
    pack_all,
    packed_run,
)
from tests.helpers.formats import lines, write_file
from tests.helpers.loongforge import tool_dialogues
from tests.helpers.outputs import members_of
from tests.helpers.shared_media import shared_media
from tests.helpers.tiny_families import encoder_options
from tests.helpers.videos import make_video
from tests.world import SOURCES, MakeSource, Source, World

Sections = Mapping[str, Mapping[str, Any]]

#: Unless a scenario says otherwise: several parts, packs and shards of each source.
DEFAULTS: Sections = {
    "pack": {"seq_length": 384, "max_set_aside": 1},
    "output": {"packs_per_shard": 2},
    "engine": {"samples_per_part": 10},
}


@dataclass(frozen=True)
class Expected:
    """The samples in packs, those set aside by their reasons, and what else the output must be."""

    packed: int
    set_aside: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Run], None] = lambda run: None


@dataclass(frozen=True)
class Scenario:
    """Something that is packed."""

    #: a name in `tests.world.SOURCES`, or a function that writes it
    source: str | MakeSource
    #: sections of the configuration beside DEFAULTS; a model family other than the default gets
    #: its tiny checkpoint
    config: Sections
    expected: Expected
    #: where the output lies: file, memory or s3
    storage: str = "file"

    @property
    def layout(self) -> str:
        """A name in LAYOUTS."""
        return str(self.config.get("output", {}).get("layout", "energon"))

    def run(self, world: World, path: Path | str, **sections: Mapping[str, Any]) -> Run:
        """Return the run over an output that is not packed yet, with some sections changed."""
        given = [DEFAULTS, self.config, {"output": {"path": str(path)}}, sections]
        names = {name for one in given for name in one}
        merged = {
            name: {key: value for one in given for key, value in one.get(name, {}).items()}
            for name in names
        }
        family = merged.get("model", {}).get("family", "")
        if family and FAMILIES[family].transformers_name:
            own = {"processor": str(world.checkpoint(family)), "max_pixels": None}
            merged["model"] = own | encoder_options(family) | merged["model"]
        return make_run(world.source(self.source), Path(), **merged)


def packs_of(run: Run) -> Iterator[tuple[str, RestoredPack]]:
    """Return each pack with its split, as it is read back by its number."""
    for split in run.config.output.split:
        for pack in PackedFolder(run.workspace.root, split=split):
            yield split, restore_pack(pack.record, pack.key)


def counts_of(run: Run, name: str) -> list[list[int]]:
    """Return a column of the index for the samples of each pack in the plan."""
    plan = open_plan(run).packs
    values = open_index(run).array(name)[plan.sample_ids]
    return [own.tolist() for own in np.split(values, plan.pack_offsets[1:-1])]


def of_one_kind(run: Run) -> None:
    """Packs hold samples with pictures, or samples without."""
    kinds = [{count > 0 for count in own} for own in counts_of(run, "num_images")]
    assert {frozenset(own) for own in kinds} == {frozenset({True}), frozenset({False})}


def of_few(run: Run) -> None:
    """Check that packs hold two samples and two pictures at most, and that some do."""
    counts = counts_of(run, "num_images")
    assert (max(map(len, counts)), max(map(sum, counts))) == (2, 2)


def padded(run: Run) -> None:
    """Samples count in multiples of 16, and packs are not fuller than their rows."""
    for own in counts_of(run, "num_tokens"):
        assert sum(-(-count // 16) * 16 for count in own) <= run.config.pack.seq_length


def with_trees(run: Run) -> None:
    """Some samples of a pack share a prefix, and a medium of it is stored once."""
    plan = open_plan(run).packs
    assert plan.branches is not None
    assert int(plan.branches.sum()) > 5
    tokens = open_index(run).array("num_tokens")[plan.sample_ids].sum()
    assert plan.info.num_tokens < 0.8 * tokens


def apart(run: Run) -> None:
    """Samples of a group are in one split, and there are samples in each."""
    split_of: dict[str, set[str]] = {}
    for split, pack in packs_of(run):
        for key in pack.keys:
            split_of.setdefault(f"{int(key) // 3}", set()).add(split)
    assert all(len(own) == 1 for own in split_of.values())
    assert {split for own in split_of.values() for split in own} == {"train", "val", "test"}


def used_twice(run: Run) -> None:
    """Samples of the second source are in two packs, and never twice in one."""
    keys = [key for _, pack in packs_of(run) for key in pack.keys]
    firsts = [key.partition("#")[0] for key in keys]
    assert {firsts.count(key) for key in firsts if key.startswith("second")} == {2}
    for _, pack in packs_of(run):
        own = [key.partition("#")[0] for key in pack.keys]
        assert len({*own}) == len(own)


def in_folders(run: Run) -> None:
    """Check that shards are two to a folder, and hold several packs, but not more than fit."""
    folders = {path.parent for path in run.workspace.root.glob("train-*/*.tar")}
    assert len(folders) > 1
    assert {len([*folder.glob("*.tar")]) for folder in folders} <= {1, 2}
    sizes = [path.stat().st_size for folder in folders for path in folder.glob("*.tar")]
    assert len(sizes) < open_plan(run).packs.num_packs
    assert max(sizes) <= run.config.output.max_shard_bytes  # type: ignore[operator]


def shown_in_place(run: Run) -> None:
    """Pictures stand where the text has them; what is no picture stays text."""
    for _, restored in packs_of(run):
        for key, sample in zip(restored.keys, restored.sub_samples, strict=True):
            assert isinstance(sample, SourceSample)
            mark = "![](gone.jpg)" if int(key) % 5 == 4 else "<image>"
            assert [turn.prompt for turn in sample.turns] == [
                f"Of {mark}: what is {key}?",
                "And <img>?",
            ]
            assert sample.turns[0].answer == f"![](a.jpg) and {key}."
            assert len(sample.images) == (mark == "<image>")


def nothing_copied(run: Run) -> None:
    """Packs hold no media."""
    names = {name.rpartition(".")[2] for name in members_of(run.workspace.root)}
    assert names == {"json"}


def cut(run: Run) -> None:
    """Some samples are parts of records, no turn, or piece of text, is in two of them, and parts of
    a record are used equally often, in one split but in no pack together."""
    keys = [(split, key) for split, pack in packs_of(run) for key in pack.keys]
    turns: dict[str, list[int]] = {}
    where: dict[str, set[tuple[str, int]]] = {}
    uses = Counter(key.partition("#")[0] for _, key in keys)
    for split, key in keys:
        part = key.partition("#")[0]
        where.setdefault(part.partition("[")[0], set()).add((split, uses[part]))
    for part in uses:
        name, _, span = part.rstrip("]").partition("[")
        turns.setdefault(name, []).extend(range(*map(int, span.split(":"))) if span else ())
    assert sum(map(bool, turns.values())) > 1
    assert all(len({*own}) == len(own) for own in turns.values())
    assert all(len(own) == 1 for own in where.values())
    for _, pack in packs_of(run):
        names = [key.partition("#")[0].partition("[")[0] for key in pack.keys]
        assert len({*names}) == len(names)


def weighed(run: Run) -> None:
    """A turn's weight is stored, and the manifest says that there are fractions."""
    manifest = json.loads(run.workspace.manifest.read_bytes())
    assert manifest["loss_weights"] == "fractional"
    assert any(b"0.25" in data for name, data in members_of(run.workspace.root).items()
               if name.endswith(".json"))  # fmt: skip


def broken(folder: Path) -> Source:
    """Records that are set aside for many reasons, and four good ones, two with the same id."""
    write_file(folder / "a.jpg", image_bytes())
    write_file(folder / "cut.jpg", image_bytes()[:300])
    write_file(folder / "no.jpg", b"no picture")
    write_file(folder / "thin.png", image_bytes(900, 3, "PNG"))

    def asked(key: str, answer: str = "Red.", *images: str) -> dict[str, Any]:
        question = "<image>" * len(images) + "What?"
        return {"id": key, "messages": dialogue(question, answer), "images": images}

    good = [asked("a", "Red.", "a.jpg"), asked("b"), asked("c", "Blue."), asked("b", "Green.")]
    bad = [
        asked("gone", "Red.", "gone.jpg"), asked("cut", "Red.", "cut.jpg"), asked("b"),
        asked("no", "Red.", "no.jpg"), asked("thin", "Red.", "thin.png"), asked("empty", " "),
        {**asked("count", "Red.", "a.jpg"), "images": []}, {"id": "none"},
        {"id": "roles", "messages": dialogue("Q", "A")[1:]}, asked("outside", "Red.", "../a.jpg"),
        asked("long", "word " * 500),
        {"id": "film", "messages": dialogue("<video>What?", "Red."), "videos": ["no.jpg"]},
    ]  # fmt: skip
    write_file(folder / "chat.jsonl", lines([*good, *bad]) + b"{\n")
    return {"format": "jsonl", "path": str(folder / "chat.jsonl"), "task": "bmr"}


def chosen(folder: Path) -> Source:
    """Write questions in groups of three, with a score and a rating of each turn, and leave out
    turns of few stars."""
    rows = []
    for i in range(24):
        texts = dialogue(f"What is {i}?", f"It is {i}.", "Sure?", "Yes. " * (1 + i % 7))
        row = {"id": f"{i}", "messages": texts, "doc": f"{i // 3}", "score": i % 5}
        rows.append({**row, "stars": [3, 1 + i % 4]})
    write_file(folder / "a.jsonl", lines(rows))
    source = {"format": "jsonl", "path": str(folder), "task": "bmr", "fields": {"group": "doc"}}
    return {**source, "keep": ["score"], "min_rating": {"stars": 2}}


def two(folder: Path) -> list[dict[str, Any]]:
    """Write two sources in different formats."""
    first = formats.jsonl(folder / "first", formats.draw_samples(14))
    other = formats.webdataset(folder / "second", formats.draw_samples(8, seed=1))
    named = [{**first, "name": "first"}, {**other, "name": "second"}]
    return [{**one, "task": "bmr"} for one in named]


def repeated(folder: Path) -> Source:
    first, second = two(folder)
    return [{**first, "repeat": 0.5}, {**second, "repeat": 2}]


def weighted(folder: Path) -> Source:
    first, second = two(folder)
    return [{**first, "weight": 1}, {**second, "weight": 2}]


def skipping(folder: Path) -> Source:
    """Dialogues, of which another output holds the first six."""
    samples = formats.draw_samples(15)
    source = {**formats.jsonl(folder / "first", samples[:6]), "task": "bmr"}
    pack_all(make_run(source, folder / "packed"))
    whole = {**formats.jsonl(folder / "whole", samples), "task": "bmr"}
    return {**whole, "skip": [str(folder / "packed")]}


def of_index(folder: Path) -> Source:
    """Write the index of another output, to object storage, and a source beside it."""
    first, second = two(folder)
    pack_all(make_run(first, folder / "packed"))
    return [{"format": "index", "path": f"memory://{folder}/packed"}, second]


def of_packs(folder: Path) -> Source:
    """Our own packs, as a source."""
    source = {**formats.jsonl(folder / "first", formats.draw_samples(11)), "task": "bmr"}
    run = packed_run(source, folder / "packed")
    return {"format": "packs", "path": str(run.workspace.root), "task": "bmr"}


def shared_captions(folder: Path) -> Source:
    """Captions, whose first token is trained, of the same few pictures and videos."""
    return shared_media(folder / "data", (24, 4, 0), (5, 1), captions=True)


def more_media(folder: Path) -> Source:
    """Dialogues that begin with two pictures, or a picture and a video, and show more later."""
    source = shared_media(folder / "data", (12, 2, 0))
    records = []
    for i in range(24):
        first = [["0.jpg", "1.jpg"], ["2.jpg", "0.mp4"], ["1.mp4"]][i % 3]
        later = [[f"{3 + i % 9}.jpg"], [], ["0.mp4", "4.jpg"]][i // 3 % 3]
        begin, end = (
            "".join(f"<{'image' if name.endswith('jpg') else 'video'}>" for name in names)
            for names in (first, later)
        )
        said = dialogue(f"{begin}\nWhat is {i}?", "This.", f"{end}And this?", f"It is {i}.")
        media = formats.media_fields([*first, *later])
        records.append({"id": f"{i}", "messages": said, **media})
    write_file(folder / "data" / "questions.jsonl", lines(records))
    return {**source, "task": "bmr"}


def texts(folder: Path) -> Source:
    rng = np.random.default_rng(0)
    drawn = (" ".join(rng.choice(WORDS, rng.integers(3, 80))) for _ in range(25))
    write_file(folder / "a.txt", "\n".join(drawn).encode())
    return {"format": "text", "path": str(folder), "task": "captioning", "text_only": True}


def captions(folder: Path) -> Source:
    for i in range(15):
        write_file(folder / f"{i}.txt", f"A circle, {i} of them.".encode())
        write_file(folder / f"{i}.jpg", image_bytes(56 + 28 * (i % 3), 84, shade=i))
    return {"format": "captions", "path": str(folder), "task": "captioning"}


def documents(folder: Path) -> Source:
    """Documents of paragraphs, every third with a picture in front; some fit no pack."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(12):
        parts = [f"{' '.join(rng.choice(WORDS, 12))} {k} of {i}." for k in range(1 + 3 * (i % 8))]
        text = "\n\n".join("<image>" * (k % 3 == 0) + part for k, part in enumerate(parts))
        rows.append({"id": f"d{i}", "text": text, "images": ["a.jpg"] * text.count("<image>")})
    write_file(folder / "a.jpg", image_bytes())
    write_file(folder / "a.jsonl", lines(rows))
    return {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "captioning"}


def conversations_twice(folder: Path) -> Source:
    source = SOURCES["conversations"](folder)
    assert isinstance(source, dict)
    return {**source, "repeat": 1.5}


def long_rows(folder: Path) -> Source:
    """Dialogues of three to six turns in a table, with a picture in the first."""
    samples = [
        (key, messages + dialogue(*["And?", "red " * 50] * (2 + i % 4)), images)
        for i, (key, messages, images) in enumerate(formats.draw_samples(12))
    ]
    return {**formats.parquet(folder, samples), "task": "bmr"}


def fractions(folder: Path) -> Source:
    """Dialogues with answers of little weight, and of none."""
    rows = []
    for i in range(12):
        texts = dialogue("Ask.", f"Little {i}.", "Ask.", "Nothing.", "Ask.", "All " * (1 + i % 5))
        for message, weight in ((texts[1], 0.25), (texts[3], 0)):
            message["loss_weight"] = weight  # type: ignore[assignment]
        rows.append({"id": f"{i}", "messages": texts, "images": ["a.jpg"] * (i % 2)})
    write_file(folder / "a.jpg", image_bytes())
    write_file(folder / "a.jsonl", lines(rows))
    return {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr"}


def in_texts(folder: Path) -> Source:
    """Dialogues with a picture in each first prompt, and marks of other projects; for every fifth
    the file is missing."""
    data = base64.b64encode(image_bytes(84, 56)).decode()
    marks = "![](a.jpg) <img>a.jpg</img> [IMG] ![] ![](gone.jpg)".split()
    marks[3] += f"(data:image/jpeg;base64,{data})"
    rows = []
    for i in range(15):
        said = dialogue(
            f"Of {marks[i % 5]}: what is {i}?", f"![](a.jpg) and {i}.", "And <img>?", "A."
        )
        rows.append({"id": f"{i}", "messages": said} | ({"image": "a.jpg"} if i % 5 == 2 else {}))
    write_file(folder / "a.jpg", image_bytes())
    write_file(folder / "a.jsonl", lines(rows))
    return {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr"}


#: Options of clips of one file, each of several questions.
OF_CLIPS: list[dict[str, Any]] = [
    *({"video_start": start, "video_end": start + 1.5, "fps": 2} for start in (0, 0.5, 1)),
    {"nframes": 4},
    {},
]


def clips(folder: Path) -> Source:
    """Dialogues about clips of one video: of one, or of another in each of three turns; and of a
    picture that has fewer pixels in some."""
    rows = []
    for i in range(20):
        messages = []
        for turn in range(3 if i >= 10 else 1):
            video = {"type": "video", "video": "a.mp4", **OF_CLIPS[(i + turn) % 5]}
            picture = {"type": "image", "image": "a.jpg", "max_pixels": 28**2 * (4 + i % 3)}
            asked = [video, picture if turn else {"type": "text", "text": f"{i}?"}]
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "A bar."},
            ]
        rows.append({"id": f"{i}", "messages": messages})
    write_file(folder / "a.mp4", make_video(24, 8, 96, 64))
    write_file(folder / "a.jpg", image_bytes(280, 280))
    write_file(folder / "a.jsonl", lines(rows))
    return {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr"}


def as_asked(run: Run) -> None:
    """Samples have the options of their media, and share prefixes with these alone."""
    num_trees = 0
    for _, pack in packs_of(run):
        for sample in pack.sub_samples:
            assert isinstance(sample, SourceSample)
            number, _, part = sample.key.partition("[")
            first = int(part[:1] or 0)
            of_videos = sample.media_options[len(sample.images) :]
            turns = range(first, first + len(sample.turns))
            asked = [OF_CLIPS[(int(number) + turn) % 5] for turn in turns]
            assert [one.given for one in of_videos] == asked
        for tree in pack.trees:
            num_trees += 1
            own = pack.sub_samples[tree.first : tree.end]
            assert len({one.media_options[len(one.images)] for one in own}) == 1  # type: ignore
    assert (num_trees > 2) == bool(run.config.pack.share_prefixes)


def tools(folder: Path) -> Source:
    return {"format": "jsonl", "path": str(tool_dialogues(folder / "source")), "task": "bmr"}


def in_memory(folder: Path) -> Source:
    """Captions that are read from object storage."""
    captioning_pairs(folder, 24)
    return {"format": "pairs", "path": f"memory://{folder}", "task": "captioning"}


def pack(**options: Any) -> Sections:
    return {"pack": options}


def output(**options: Any) -> Sections:
    return {"output": options}


def family(name: str, **sections: Mapping[str, Any]) -> Sections:
    return {"model": {"family": name}, **sections}


#: Packs of few samples, so that eleven fill several shards.
FEW = pack(seq_length=160)
#: Videos of few tokens.
CLIPS = {"min_pixels": 784, "video_min_pixels": 784, "video_max_pixels": 28 * 28 * 12}
CUT = pack(on_overlong="split_turns", seq_length=256)
RANKS = {"pad_multiple": 16, "order": {"num_ranks": 2}}
LINES = {"start": {"first": 0.9, "second": 0.1}, "end": {"first": 0.3, "second": 0.7}}
TREES: Sections = {
    "model": {**CLIPS, "resize": "torch"},
    **pack(seq_length=768, share_prefixes=True),
}
SPLIT = {"split": {"train": 0.6, "val": 0.4}}
SPLITS = {"split": {"train": 0.5, "val": 0.3, "test": 0.2}}
REFER = output(media="refer", **SPLIT)
#: A run in S3 makes some 300 requests, of 20 ms each: laws that run it again and again take this
#: scenario only where every case is asked for.
SLOW = "to S3"

#: Reasons of the records of `broken`.
REASONS = {
    "bad_image": 2,
    **dict.fromkeys(
        ("missing_image", "aspect_ratio", "empty_answer", "image_count_mismatch", "bad_record",
         "bad_roles", "path_outside_root", "bad_json", "duplicate_key", "overlong", "bad_video"),
        1,
    ),
}  # fmt: skip

FAMILIES_OF_SHORT = "qwen2_5_vl qwen3_vl qwen3_5 llava_1_5 mistral3 gemma4 glm4v internvl3".split()

SCENARIOS: dict[str, Scenario] = {
    # formats
    "captioning": Scenario("captioning", {}, Expected(40)),
    "vqa": Scenario("vqa", {}, Expected(24)),
    "bmr": Scenario("bmr", {}, Expected(30)),
    **{name: Scenario(name, FEW, Expected(11)) for name in formats.WRITERS if name != "pairs"},
    "text": Scenario(texts, {}, Expected(25)),
    "captions": Scenario(captions, FEW, Expected(15)),
    "videos": Scenario("videos", {"model": CLIPS}, Expected(12)),
    "our packs": Scenario(of_packs, FEW, Expected(11)),
    "from memory": Scenario(in_memory, {}, Expected(24)),
    "index": Scenario(of_index, FEW, Expected(22)),
    # what becomes of samples
    "broken": Scenario(broken, {}, Expected(4, REASONS)),
    "cut": Scenario("conversations", CUT, Expected(28, check=cut)),
    "cut and repeated": Scenario(
        conversations_twice, {"pack": {**CUT["pack"], "context_parallel": 2}},
        Expected(47, check=cut),
    ),
    "cut in splits": Scenario(
        long_rows, {"pack": {**CUT["pack"], **RANKS}, **output(**SPLIT)}, Expected(18, check=cut)
    ),
    "cut documents": Scenario(documents, CUT, Expected(16, check=cut)),
    "skip": Scenario(skipping, FEW, Expected(9)),
    "chosen": Scenario(
        chosen, {**pack(seq_length=128, where=[["score", ">=", 2]]), **output(**SPLITS)},
        Expected(14, {"not_chosen": 10}, apart),
    ),
    "repeat": Scenario(repeated, {}, Expected(23, {"not_drawn": 7}, used_twice)),
    "weights": Scenario(weighted, {}, Expected(41)),
    "in texts": Scenario(in_texts, FEW, Expected(15, check=shown_in_place)),
    "clips": Scenario(clips, {**TREES, **pack(share_prefixes=True)}, Expected(20, check=as_asked)),
    "clips, cut, referred to": Scenario(
        clips,
        {"model": CLIPS, **pack(on_overlong="split_turns", seq_length=88), **output(media="refer")},
        Expected(30, check=as_asked),
    ),
    "loss weights": Scenario(fractions, FEW, Expected(12, check=weighed)),
    # families
    **{name: Scenario("short", family(name), Expected(24)) for name in FAMILIES_OF_SHORT},
    "tools": Scenario(tools, family("qwen3_vl", **pack(seq_length=600)), Expected(18)),
    # options of a plan
    "one kind": Scenario("bmr", pack(homogeneous=True), Expected(30, check=of_one_kind)),
    "locality": Scenario("bmr", pack(assignment="locality"), Expected(30)),
    "few samples": Scenario("bmr", pack(max_samples=2, budgets={"images": 2}),
                            Expected(30, check=of_few)),
    "padding": Scenario(
        "bmr",
        pack(pad_multiple=16, strategy="first_fit_decreasing",
             order={"num_ranks": 2, "uniform": True}),
        Expected(30, check=padded),
    ),
    "mixture": Scenario(two, pack(mixture=LINES), Expected(23)),
    "trees": Scenario("shared media", TREES, Expected(31, check=with_trees)),
    "trees of more media": Scenario(
        more_media, {**TREES, "pack": {**TREES["pack"], "pad_multiple": 16}},
        Expected(24, check=with_trees),
    ),
    "trees of captions": Scenario(shared_captions, TREES, Expected(28, check=with_trees)),
    # the output
    "small shards": Scenario(
        "captioning", output(packs_per_shard=99, max_shard_bytes=60_000, shards_per_folder=2),
        Expected(40, check=in_folders),
    ),
    "refer": Scenario("bmr", REFER, Expected(30, check=nothing_copied)),
    "refer to tars": Scenario("webdataset", REFER, Expected(11, check=nothing_copied)),
    "llava_onevision": Scenario("vqa", output(layout="llava_onevision"), Expected(24)),
    "llava_onevision2": Scenario(
        "bmr", family("llava_onevision_2", **output(layout="llava_onevision2")), Expected(30)
    ),
    "loongforge": Scenario(
        tools,
        family("qwen3_vl", **pack(seq_length=600), **output(layout="loongforge")),
        Expected(14, {"not_in_layout": 4}),
    ),
    "to S3": Scenario(captions, output(**SPLIT), Expected(15), "s3"),
    "trees, referred to, in memory": Scenario(
        "shared media", {**TREES, **REFER}, Expected(31, check=with_trees), "memory"
    ),
}  # fmt: skip
