"""LLaMA-Factory on packs, and against what its own packing makes of the same samples; its recipe of
docs/recipes.md, and what is wrong in others."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
from llamafactory.data.formatter import StringFormatter
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.processor import PackedSupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES, register_template
from llamafactory.hparams import DataArguments, parser
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as mixture

from launch.trainers.llama_factory import tuner
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.concatenate import merge_rows, split_row
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.model_inputs import segment_kwargs, to_transformers_kwargs
from task_encoders.samples import SourceSample, place_media
from tests.helpers.datasets import dialogue, make_run, mixed_pairs, pack_all
from tests.helpers.hf_trainers import number_of, several_packs, with_processor
from tests.helpers.pages import blocks
from tests.helpers.peers import (
    assert_same,
    check_contradictions,
    check_losses,
    check_order,
    open_packs,
    pack_dialogues,
    stored_samples,
    token_losses_alone,
)
from tests.helpers.rank_processes import run_ranks
from tests.helpers.shared_media import few_trees
from tests.helpers.tiny_families import encoder_options
from tests.peers import Say
from tests.world import World

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
#: A CPU in place of a GPU, and the optimizer of `our_losses`.
ON_A_CPU: dict[str, Any] = {
    "bf16": False,
    "flash_attn": "sdpa",
    "use_cpu": True,
    "eval_dataset": None,
    "eval_strategy": "no",
    "freeze_vision_tower": False,
    "freeze_multi_modal_projector": False,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "adam_beta2": 0.95,
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
#: Captions as packs have them: the image, the caption, and the end of the turn.
CAPTIONS = "captions_as_packed"
if CAPTIONS not in TEMPLATES:
    register_template(
        name=CAPTIONS,
        format_user=StringFormatter(slots=["{{content}}"]),
        format_assistant=StringFormatter(slots=["{{content}}<|im_end|>"]),
        mm_plugin=get_mm_plugin("qwen2_vl", "<|image_pad|>", "<|video_pad|>"),
    )


def recipe(checkpoint: Path, packed: Path, output: Path, **options: Any) -> dict[str, Any]:
    """The recipe of the documentation, for this model and these packs, on a CPU."""
    (text,) = [block.text for block in blocks(PAGE.read_text()) if "stage: sft" in block.text]
    folders = {"model_name_or_path": str(checkpoint), "dataset": str(packed)}
    whole = {**yaml.safe_load(text), **folders, "output_dir": str(output), **ON_A_CPU, **options}
    return {name: value for name, value in whole.items() if value is not None}


class Recorder(TrainerCallback):
    """Numbers of the packs trained, losses of the steps, and the weights at the end."""

    def __init__(self, packed: Path) -> None:
        self._packs = open_packs(packed, trees=True)
        self.numbers: list[int] = []
        self.losses: list[float] = []
        self.weights: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].register_forward_pre_hook(
            lambda _, __, given: self.numbers.append(number_of(given["input_ids"], self._packs)),
            with_kwargs=True,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.weights = [weight.detach().clone() for weight in kwargs["model"].parameters()]


def train(checkpoint: Path, packed: Path, output: Path, **options: Any) -> Recorder:
    """A run of LLaMA-Factory's command."""
    recorder = Recorder(packed)
    tuner.run_exp(recipe(checkpoint, packed, output, **options), [recorder])
    return recorder


def own_arguments(samples: Iterable[tuple[SourceSample, list[bytes]]]) -> dict[str, list[Any]]:
    """Samples in the columns that LLaMA-Factory's processors take. Images are upright already: it
    does not turn them by their EXIF orientation."""
    rows = []
    for sample, media in samples:
        images = [ImageOps.exif_transpose(Image.open(io.BytesIO(data))) for data in media]
        if sample.task == "captioning":
            turns = [("<image>" * len(images), sample.turns[0].answer)]
        else:
            turns = [(turn.prompt, turn.answer) for turn in place_media(sample)]
        messages = dialogue(*(text for turn in turns for text in turn))
        rows.append((messages[:-1], messages[-1:], sample.system, "", images, [], []))
    names = ("_prompt", "_response", "_system", "_tools", "_images", "_videos", "_audios")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


class OwnPacking:
    """LLaMA-Factory's `neat_packing`.

    Args:
        template: a name.
        model: has the function for M-RoPE's positions.
        attention: its collator builds a mask of four dimensions unless it is flash_attention_2.
    """

    def __init__(
        self, template: str, processor: Any, model: Any = None, attention: str = "flash_attention_2"
    ) -> None:
        self._processor = processor
        processor.image_max_pixels, processor.image_min_pixels = 10**9, 1  # the processor's own
        self._data_args = DataArguments(template=template, neat_packing=True)
        tokenizer = processor.tokenizer
        self.template = get_template_and_fix_tokenizer(tokenizer, self._data_args)
        self._collator = SFTDataCollatorWith4DAttentionMask(
            template=self.template,
            tokenizer=tokenizer,
            processor=processor,
            model=model,
            pad_to_multiple_of=8,
            block_diag_attn=True,
            neat_packing=True,
            attn_implementation=attention,
        )

    def pack(
        self, samples: Iterable[tuple[SourceSample, list[bytes]]], cutoff_len: int
    ) -> list[dict[str, Any]]:
        """Packs of some samples, as its dataset holds them. `cutoff_len` is the user's option."""
        self._data_args.cutoff_len = cutoff_len - 1  # as DataArguments does for packing
        packing = PackedSupervisedDatasetProcessor(
            self.template, self._processor.tokenizer, self._processor, self._data_args
        )
        columns = packing.preprocess_dataset(own_arguments(samples))
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def row(self, pack: dict[str, Any]) -> dict[str, Any]:
        """A pack as its model gets it."""
        return self._collator([dict(pack)])


def without_newlines(
    row: dict[str, Any], pack: dict[str, Any], end: int, newline: int
) -> dict[str, Any]:
    """A row without the newline that LLaMA-Factory keeps after the last turn of every sample, and
    without the loss on those after other turns, which no model has to write."""
    bounds = pack["packing_params"]["sequence_boundaries"][:-1]  # the last segment is padding
    tokens = row["input_ids"][0, : bounds[-1]]
    after_end = torch.cat([torch.tensor([False]), (tokens[1:] == newline) & (tokens[:-1] == end)])
    kept = torch.ones_like(after_end)
    last = torch.tensor(bounds[1:]) - 1
    kept[last] = ~after_end[last]
    labels = row["labels"][0, : bounds[-1]].masked_fill(after_end, -100)
    places = kept.long().cumsum(0)
    return {
        **row,
        "input_ids": tokens[kept],
        "labels": labels[kept],
        "position_ids": row["position_ids"][..., : bounds[-1]][..., kept],
        "boundaries": [0, *places[last].tolist()],
    }


def order_of_knapsack(lengths: Sequence[int]) -> list[int]:
    """Numbers of samples as its knapsack takes them, all of which fit: the longest first, and of
    equal ones the last."""
    return sorted(range(len(lengths)), key=lambda number: (-lengths[number], -number))


VERSION = f"LLaMA-Factory {version('llamafactory')}"
FAMILY = "qwen2_vl"


LIMITS = {name: encoder_options(FAMILY)[name] for name in ("min_pixels", "max_pixels")}


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    with_processor(case[0], **LIMITS)
    return case


def unpacked_loss(checkpoint: Path, packed: Path, number: int) -> float:
    """Loss of a pack's samples, each encoded by LLaMA-Factory and trained alone."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    processor = AutoProcessor.from_pretrained(checkpoint)
    own = OwnPacking("qwen2_vl", processor, model, "sdpa")
    end, newline = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
    total, count = 0.0, 0
    for sample in stored_samples(open_packs(packed)[number]):
        (pack,) = own.pack([sample], 512)
        row = without_newlines(own.row(pack), pack, end, newline)
        media = {name: row[name] for name in ("pixel_values", "image_grid_thw") if sample[1]}
        labels = int((row["labels"] != -100).sum())
        with torch.no_grad():
            loss = model(
                input_ids=row["input_ids"][None],
                labels=row["labels"][None],
                position_ids=row["position_ids"][1:],  # without the first, which is time
                use_cache=False,
                **media,
            ).loss
        total += float(loss) * labels
        count += labels
    return total / count


def test_steps_are_those_of_our_own_trainer_and_are_resumed(
    case: Any, tmp_path: Path, say: Say
) -> None:
    steps = {"max_steps": 6, "save_steps": 3}
    whole = train(*case, tmp_path / "whole", **steps)
    assert whole.numbers == list(range(6))
    said = check_losses(case[1], case[0], whole.losses, tmp_path / "ours")
    assert abs(unpacked_loss(*case, 0) - whole.losses[0]) < 1e-4
    saved = str(tmp_path / "whole/checkpoint-3")
    rest = train(*case, tmp_path / "again", **steps, resume_from_checkpoint=saved)
    assert rest.numbers == whole.numbers[3:]
    assert rest.losses == whole.losses  # those of the first three are in the checkpoint
    assert all(map(torch.equal, rest.weights, whole.weights))
    say(f"{said}, 6 steps resumed after 3 to the last bit")


@pytest.mark.parametrize("attention", ["sdpa", "fa2"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_steps_are_those_of_the_samples_alone(
    family: str, attention: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fa2 it gives recurrent layers the boundaries itself, with others our trainer does.
    (Without flash attention it goes on with sdpa.)"""
    checkpoint, packed = several_packs(family, tmp_path)
    with_processor(checkpoint)
    with monkeypatch.context() as patch:  # it changes classes, also those of the samples alone
        layers = [dense.Qwen3_5DecoderLayer, dense.Qwen3_5GatedDeltaNet]
        layers += [mixture.Qwen3_5MoeDecoderLayer, mixture.Qwen3_5MoeGatedDeltaNet]
        for layer in layers:
            patch.setattr(layer, "forward", layer.forward)
        options = {"template": family.removesuffix("_moe"), "flash_attn": attention}
        losses = train(checkpoint, packed, tmp_path / "out", max_steps=2, **options).losses
        changed = sum("llamafactory" in layer.forward.__module__ for layer in layers)
    assert changed == 2 * (attention == "fa2" and family.startswith("qwen3_5"))
    say(f"{attention}: {check_losses(packed, checkpoint, losses)}")


class _Order(TrainerCallback):
    """Reads an epoch before the first step."""

    def __init__(self, packed: Path) -> None:
        self._packs = open_packs(packed)
        self.numbers: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = kwargs["train_dataloader"]
        self.numbers = [number_of(row["input_ids"], self._packs) for row in rows]


def numbers_read(packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    order = _Order(packed)
    folder = output / os.environ["WORLD_SIZE"]  # it goes on in a folder that has a run
    arguments = recipe(checkpoint, packed, folder, max_steps=1, save_strategy="no")
    tuner.run_exp(arguments, [order])
    return order.numbers


def test_samples_that_share_prefixes(world: World, tmp_path: Path, say: Say) -> None:
    made, trees, _ = few_trees(world, FAMILY)
    checkpoint = shutil.copytree(made, tmp_path / "model")
    with_processor(checkpoint, **LIMITS)
    packs = open_packs(trees, trees=True)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    alone = token_losses_alone(model, packs, 0).mean().item()
    run = train(checkpoint, trees, tmp_path / "run", max_steps=1)
    assert run.numbers == [0]
    assert run.losses == pytest.approx([alone], abs=1e-5)
    say("a pack of branches has the loss of their samples alone")


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    checkpoint, packed = case
    say(check_order(packed, tmp_path, numbers_read, checkpoint, tmp_path / "out"))


def rank_run(checkpoint: Path, packed: Path, output: Path) -> tuple[list[int], list[float]]:
    """Packs and losses of a rank."""
    run = train(checkpoint, packed, output, max_steps=4, save_strategy="no")
    return run.numbers, run.losses


def test_ranks_with_and_without_images_train_what_one_does(
    case: Any, tmp_path: Path, say: Say
) -> None:
    """DDP would wait for the vision tower of the rank that has no image."""
    checkpoint, _ = case
    pairs = mixed_pairs(tmp_path / "source", 60)
    packed = pack_dialogues(pairs, "qwen2_vl", checkpoint, tmp_path, seq_length=200)
    columns = open_packs(packed).columns()
    assert columns is not None
    has_images = columns.media[:8] > 0
    assert (has_images[::2] != has_images[1::2]).any()
    ranks = run_ranks(2, tmp_path / "ranks", rank_run, checkpoint, packed, tmp_path / "two")
    assert [numbers for numbers, _ in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = train(
        *(checkpoint, packed, tmp_path / "one"),
        max_steps=4,
        save_strategy="no",
        gradient_accumulation_steps=2,
    )
    assert alone.numbers == list(range(8))
    difference = max(abs(a - b) for a, b in zip(alone.losses, ranks[0][1], strict=True))
    assert difference < 1e-4
    say(f"two ranks, some steps with images on one alone, as one (to {difference:.0e})")


def test_every_demo_pack_is_what_its_packing_would_give(
    task: str, demo: dict[str, Path], say: Say
) -> None:
    """Rows that `neat_packing` makes of a pack's samples, which it sorts by length."""
    template, model = CAPTIONS if task == "captioning" else "qwen2_vl", tiny_qwen2_vl()
    num_packs = num_samples = 0
    for split in ("train", "val"):
        packs = open_packs(demo[task], split)
        vision = packs.task_encoder.encoder.options
        processor = builtin_processor(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
        end, newline = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
        own = OwnPacking(template, processor, model)
        for number, stored in enumerate(packs):
            samples = list(stored_samples(stored))
            (pack,) = own.pack(samples, packs.task_encoder.seq_length + 8 * len(samples))
            theirs = without_newlines(own.row(pack), pack, end, newline)
            row = packs.row(number).row
            order = order_of_knapsack(row.cu_lengths.diff().tolist())
            ours = merge_rows([split_row(row)[sample] for sample in order])
            segments = segment_kwargs(ours.position_ids[:, None], ours.cu_lengths)
            expected = {
                "input_ids": ours.tokens,
                "labels": ours.labels,
                "boundaries": ours.cu_lengths,
                "position_ids": segments["position_ids"],
                "pixel_values": ours.pixel_values,
                "image_grid_thw": ours.image_grid_thw,
            }
            # Its first row, which should count tokens, is M-RoPE's time.
            expected["position_ids"][0] = expected["position_ids"][1]
            if not len(ours.image_grid_thw):  # it adds a masked image
                del expected["pixel_values"], expected["image_grid_thw"]
            assert_same(theirs, expected, f"{task} {split} {number}")
            num_packs += 1
            num_samples += len(samples)
    assert num_samples > num_packs > 5
    say(f"{num_packs} packs of {task} are what its neat_packing makes of their samples")


#: Options of the documented recipe that the other tests leave out.
AS_WRITTEN: Mapping[str, Any] = {"freeze_vision_tower": None, "freeze_multi_modal_projector": None}


@pytest.fixture(scope="module")
def split_packs(case: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs with a val split."""
    root = tmp_path_factory.mktemp("split")
    model = {"family": "qwen2_vl", "processor": str(case[0]), **encoder_options("qwen2_vl")}
    source = {"format": "pairs", "path": str(mixed_pairs(root / "source", 40)), "task": "bmr"}
    output = {"split": {"train": 0.8, "val": 0.2}}
    run = make_run(source, root / "packed", model=model, pack={"seq_length": 512}, output=output)
    pack_all(run)
    return root / "packed"


class _Losses(TrainerCallback):
    """Records the losses of a run's validations, and the number of samples that it trains on."""

    def __init__(self) -> None:
        self.validation: list[float] = []
        self.samples = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.samples = len(kwargs["train_dataloader"].dataset)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.validation.append(kwargs["metrics"]["eval_loss"])


def test_the_documented_recipe_validates_on_its_val_split(
    case: tuple[Path, Path], split_packs: Path, tmp_path: Path
) -> None:
    losses = _Losses()
    validation = {"eval_dataset": str(split_packs), "eval_strategy": "steps", "eval_steps": 2}
    given = recipe(case[0], split_packs, tmp_path, max_steps=2, **AS_WRITTEN, **validation)
    tuner.run_exp(given, [losses])
    packs = open_packs(split_packs, "val")
    assert losses.samples == len(open_packs(split_packs)) > len(packs) > 0
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        rows = [to_transformers_kwargs(packs.batch([number])) for number in range(len(packs))]
        expected = sum(float(model(**row).loss) for row in rows) / len(packs)
    assert losses.validation[0] == pytest.approx(expected, abs=1e-4)


def frozen_run(
    checkpoint: Path, packed: Path, output: Path, options: Mapping[str, Any]
) -> tuple[list[int], list[float]]:
    run = train(checkpoint, packed, output, max_steps=2, save_strategy="no", **options)
    return run.numbers, run.losses


@pytest.mark.parametrize("options", [{}, {"finetuning_type": "lora"}])
def test_two_ranks_train_as_documented(
    options: dict[str, Any], case: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the vision tower frozen, which is LLaMA-Factory's default."""
    folders = (*case, tmp_path / "out")
    ranks = run_ranks(2, tmp_path / "ranks", frozen_run, *folders, {**AS_WRITTEN, **options})
    assert [numbers for numbers, _ in ranks] == [[0, 2], [1, 3]]
    assert len(ranks[0][1]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": True}, "leave out packing"),
        ({"neat_packing": True}, "leave out packing, neat_packing"),
        ({"max_samples": 10, "mask_history": True}, "leave out max_samples, mask_history"),
        ({"dataset": "{packed},other"}, "name one dataset"),
        ({"eval_dataset": "other"}, "give packs as both"),
        ({"eval_dataset": "{packed}"}, "no packs in its val split"),
        ({"do_train": False}, "set do_train: true"),
        ({"pure_bf16": True}, "set bf16: true"),
    ],
)
def test_what_packs_do_not_do_is_refused(
    options: dict[str, Any],
    message: str,
    case: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parser, "is_torch_bf16_gpu_available", lambda: True)
    for name, value in options.items():
        if isinstance(value, str):
            options = {**options, name: value.format(packed=case[1])}
    with pytest.raises(ValueError, match=message) as caught:
        train(*case, tmp_path, max_steps=1, **options)
    assert "\n" not in str(caught.value)


def test_packs_that_contradict_model_or_environment_are_refused(case: Any, tmp_path: Path) -> None:
    def build(model: Path, packs: Path) -> None:
        train(with_processor(model), packs, tmp_path, max_steps=1)

    check_contradictions(build, case, tmp_path)


def test_other_data_go_llama_factorys_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"}}))
    records = [{"instruction": "Say", "input": text, "output": text} for text in "ab"]
    (tmp_path / "mine.json").write_text(json.dumps(records))
    losses = _Losses()
    options = {"dataset": "mine", "dataset_dir": str(tmp_path), "max_steps": 1}
    tuner.run_exp(recipe(*case, tmp_path / "out", **options), [losses])
    assert losses.samples == 2
