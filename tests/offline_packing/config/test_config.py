"""The configuration: what is accepted, and that every refusal names field, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from offline_packing.config.packing import PackingConfig, load_config, parse_config
from offline_packing.errors import ConfigError
from offline_packing.storage.yaml_file import parse_yaml

EXAMPLE = """
source: {format: pairs, path: data/pairs, task: captioning, keep: score}
model:
  {family: qwen2_vl, processor: builtin,
   min_pixels: 3136, max_pixels: 4014080, max_aspect_ratio: 200}
pack: {seq_length: 8192, strategy: auto, seed: 0, on_overlong: set_aside}
output: {path: out/packed, packs_per_shard: 1000, split: {train: 1.0}}
engine: {name: local, workers: 2}
"""
SMALLEST = """
source: {format: jsonl, path: chat.jsonl, task: bmr}
output: {path: out}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> PackingConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")
    return load_config(path, overrides)


def test_example_holds_the_defaults(tmp_path: Path) -> None:
    example, smallest = load(tmp_path, EXAMPLE), load(tmp_path, SMALLEST)
    assert example.model == smallest.model
    assert example.pack == smallest.pack
    assert example.output.packs_per_shard == smallest.output.packs_per_shard
    assert example.task == "captioning"
    assert smallest.engine.workers >= 1


def test_overrides(tmp_path: Path) -> None:
    given = ("pack.seq_length=1e4", "model.max_aspect_ratio=5e1", "source.path=other/data=set")
    more = ("output.split={train: 0.9, val: 0.1}", "report.global_batch_size=32", "source.name=no")
    config = load(tmp_path, EXAMPLE, *given, *more)
    assert (config.pack.seq_length, config.model.max_aspect_ratio) == (10_000, 50)
    assert config.source[0].path == "other/data=set"
    assert config.output.split == {"train": 0.9, "val": 0.1}
    assert config.report.global_batch_size == 32
    assert config.source[0].name == "no"  # not False
    text = SMALLEST.replace("{format", "[{format").replace("bmr}", "bmr}]")
    assert load(tmp_path, text, "source.0.path=b.jsonl").source[0].path == "b.jsonl"
    replaced = load(tmp_path, text, "source.0={format: pairs, path: p, task: vqa}")
    assert replaced.task == "vqa"


BAD_CLAUSE = r"pack\.where: .* compares with something that is neither a number nor a short text"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("pack.seq_len=1", r"pack\.seq_len is not a known field; valid: seq_length, strategy, se"),
        ("pack.strategy=greedy", r"known name; .*sequential, knapsack; it is sequential$"),
        ("pack.epochs=2", r"valid: .*; plan further outputs with pack\.strategy=mixed"),
        ("source.merge_same_image=true", r"valid: .*; join .* tools/convert_questions\.py"),
        ("output.layout=raw_packing", r"known name; .*; export .* offline-packing export"),
        ("source.fmt=x", r"source\.0\.fmt is not a known field; valid: format, path, task"),
        ("source.task=caption", r"source\.0\.task='caption' .*choose 'captioning', 'vqa' or 'bmr'"),
        ("engine.workers=true", r"engine\.workers=True: a number is needed"),
        ("model.max_pixels=100", r"min_pixels 3136 > max_pixels 100; lower min_pixels"),
        ("output.split={}", r"output\.split: no split"),
        ("output.split={train: 0.5}", r"shares sum to 0\.5; make them sum to 1"),
        ("output.split={train: 1.5, val: -0.5}", r"share of 'train' is 1\.5"),
        ("output.split={a/b: 1.0}", r"split name 'a/b' may hold letters"),
        ("output.path=s3://k:secret@b/x", r"output\.path='s3://…@b/x': keys in a URL"),
        ("output.path=s3://", r"output\.path='s3://': .*no bucket; write s3://BUCKET/FOLDER"),
        ("source.path=ftp://k:secret@b/x", r"source\.0\.path='ftp://…@b/x': keys in a URL"),
        ("output.key_prefix=a.b", r"key_prefix='a\.b': string should match pattern"),
        ("source.path=", r"source\.0\.path='': .*nothing is named"),
        ("source=[]", r"source.*no source is given; add one"),
        ("pack.seed", r"'pack\.seed' is not of the form a\.b=value"),
        ("pack.seed.more=1", r"pack\.seed is 0, not a mapping"),
        ("pack.seed=99999999999999999999", r"pack\.seed=9+: .*less than or equal to 9223372036"),
        ("pack.seq_length=3000000000", r"pack\.seq_length=3000000000: .*equal to 2147483647"),
        ("pack.pad_multiple=8193", r"pad_multiple 8193 > seq_length 8192"),
        ("pack.context_parallel=0", "context_parallel=0: input should be greater than or equal"),
        ("pack.context_parallel={size: 4}", "write a number, the ranks of each pack, in place of"),
        ("pack.context_parallel=8192", "pads samples to multiples of 16384 > seq_length 8192; "),
        ("pack.max_set_aside=nan", r"pack\.max_set_aside='nan': .*finite"),
        ("pack.assignment=3", r"pack\.assignment=3 is not valid; choose 'shuffle' or 'locality'"),
        ("pack.order=8", r"pack\.order=8 is not a mapping; .*fields among: num_ranks, num_workers"),
        ("pack.budgets={pixels: 3}", r"pack\.budgets\.pixels.*'images'"),
        ("pack.strategy_options={foo: 1}", r"strategy 'auto' has no option 'foo'; it has none"),
        ("pack.seed={", r"override 'pack\.seed=\{' is not valid YAML"),
        ("pack={strategy: hash_bucket, strategy_options: {phase: 1}}", "valid: phases"),
        (
            "pack={strategy: first_fit_shuffle, strategy_options: {chunk_size: 0}}",
            "chunk_size: Input should be greater than or equal to 1",
        ),
        ("pack={order: {num_ranks: 2}, assignment: locality}", "order cannot keep assignment l"),
        ("pack={max_samples: 2, strategy: hash_bucket}", "keep a limit of samples: .* one of auto"),
        ("pack={budgets: {images: 2}, strategy: hash_bucket}", "cannot keep a limit of images"),
        ("pack={budgets: {images: 2}, assignment: locality}", "its windows know tokens only"),
        ("source.image_root=images", "image_root applies to format json, jsonl, .* only"),
        ("source.split=val", "split applies to format energon, huggingface only"),
        ("source.fields={text: a}", r"source\.0?\.?fields\.text is not a known field; valid: id,"),
        ("source.fields={caption: a..b}", r"'a\.\.b' is not a path"),
        ("source.repeat=1e30", "repeat=1e"),
        ("source.repeat=0", "repeat=0: .*greater than 0"),
        ("source.format=nowhere:Source", "'nowhere:Source' cannot be imported"),
        ("source.format=offline_packing.errors:StageError", "is not a subclass of"),
        ("source.format=captions", "keep applies to format .* only"),
        ("source.keep=[a..b]", r"source\.keep='a\.\.b' is not a path"),
        ("source.min_rating={'a[': 3}", r"source\.min_rating='a\[' is not a path"),
        ("source.min_rating={a: good}", r"min_rating\.a"),
        ("source.skip={train: out}", r"skip\.0\.run.*'train' is not valid; choose 'trained'"),
        ("source.skip={}", r"skip\.0\.run: "),
        ("pack.where=[[score, '~', 3]]", r"where: \['score', '~', 3\]: \"~\" is not a valid op"),
        ("pack.where=[[stars, '>', 3]]", r"names 'stars', which no source keeps .kept: score"),
        ("pack.where=[[score, in, [3, a]]]", BAD_CLAUSE),
        ("pack.where=[[score, '>', null]]", BAD_CLAUSE),
        (f"pack.where=[[score, '==', {'x' * 257}]]", BAD_CLAUSE),
        ("pack.where=[[score, '>']]", r"\['score', '>'\] is not a clause of field, operator and"),
        ("pack.where=[[[score, '>', 3]], [score, '<', 5]]", "is not a clause of field, operator"),
        ("pack.where=[[score, in, 3]]", "'in' and 'not in' take a list, other operators one value"),
        ("pack.where=[[score, '>', [3]]]", "'in' and 'not in' take a list, other operators one"),
        ("pack.where=[score, '>', 3]", r"where: .* is not a list of clauses; write \[\[FIELD, '>="),
        ("pack.where=[]", r"pack\.where: \[\] is not a list of clauses"),
        ("pack.where=[[]]", r"pack\.where: \[\[\]\] is not a list of clauses"),
        ("pack.where=score > 3", "pack.where='score > 3' is not a list"),
        ("pack.split_turns={context_turns: 2}", "split_turns has no effect with"),
        (
            "pack={on_overlong: split_turns, split_turns: {context_turns: 1}}",
            "context_turns=1 .*all",
        ),
        ("model.loss_on=last; pack.on_overlong=split_turns", "loss_on=last and split_turns both"),
        (
            "source.task=bmr; output.layout=loongforge; "
            "pack={on_overlong: split_turns, split_turns: {context_turns: 2}}",
            "context_turns=2 shows turns without loss, and output.layout='loongforge' would train",
        ),
        ("output.path=~nobody-of-that-name/packed", "names no home folder"),
    ],
)
def test_refusals(tmp_path: Path, overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, EXAMPLE, *overrides.split("; "))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a mapping"),
        ("- a\n- b\n", "is not a mapping"),
        ("source: {", "is not valid YAML"),
        ("source: &a [*b]", "is not valid YAML"),
        ("pack: {seed: 1, seed: 2}", "key 'seed' is twice in the mapping at line 1"),
        ("output: {path: out}", "source is missing; set it"),
        ("source: {format: pairs}", "source.0.path is missing.*source.0.task is missing"),
        ("source: !!python/object:os.system {}", "is not valid YAML"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.yaml").write_text(EXAMPLE)
    for path, message in (
        (tmp_path / "nowhere.yaml", r"nowhere\.yaml' does not exist; write one as the READ"),
        ("pack.seed=1", r"'pack\.seed=1' does not exist; the YAML file"),
        (tmp_path, r"is a folder; give a YAML file, in which source\.path"),
        (tmp_path / "one", r"is a folder; give a YAML file such as .*/a\.yaml"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path)


def sources(*changes: dict[str, Any]) -> dict[str, Any]:
    common = {"format": "pairs", "path": "a", "task": "vqa"}
    return {"source": [{**common, **change} for change in changes], "output": {"path": "out"}}


def test_key_prefixes() -> None:
    assert parse_config(sources({})).key_prefixes() == [""]
    assert parse_config(sources({"name": "x"})).key_prefixes() == ["x/"]
    assert parse_config(sources({}, {"path": "d/b"})).key_prefixes() == ["a/", "b/"]


ONCE = r"are also in '[./]*d/a'; remove one of the two"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {},
            {"path": "b", "task": "captioning"},
            "tasks captioning and vqa, an output has one; .*bl",
        ),
        ({}, {"path": "b/a"}, "two sources are called 'a'; give each its own name"),
        ({"weight": 1}, {"path": "b"}, "some sources have a weight and others none"),
        ({"weight": 1, "repeat": 2}, {"path": "b", "weight": 1}, "a weight and a repeat; remove"),
        *(({"path": "d/a"}, {"name": "y", "path": path}, ONCE) for path in ("./d/a", "d/a/more")),
        ({"path": "d/a"}, {"name": "y", "path": "d/a", "repeat": 2}, ONCE),
    ],
)
def test_sources_that_do_not_go_together(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(sources(first, second))
    if message == ONCE:  # other fields make other samples
        parse_config(sources(first, {**second, "fields": {"caption": "second_caption"}}))


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load(tmp_path, SMALLEST, "output.path=~/packed", "source.path=~/chat.jsonl")
    assert config.output.path == str(tmp_path / "packed")
    assert config.source[0].path == str(tmp_path / "chat.jsonl")


def test_aliases_that_multiply_are_refused(tmp_path: Path) -> None:
    """Aliases that repeat a few values are read."""
    rows = ["source: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (tmp_path / "a.yaml").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="its aliases hold more than 1,000,000 values"):
        load_config(tmp_path / "a.yaml")
    assert parse_yaml("{a: &b [1, 2], c: *b}", "it") == {"a": [1, 2], "c": [1, 2]}
