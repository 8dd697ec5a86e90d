"""LLaMA-Factory on packs, and against what its own packing makes of the same samples; its recipe of
docs/recipes.md, and what is wrong in others."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
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
from transformers import AutoConfig, AutoModelForImageTextToText, TrainerCallback
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as mixture

from launch.loop.parallel import shutdown_parallel
from launch.trainers.llama_factory import tuner
from offline_packing.demo.training import tiny_qwen2_vl
from task_encoders.concatenate import merge_rows, split_row
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import segment_kwargs, to_transformers_kwargs
from task_encoders.samples import SourceSample, place_media
from tests.helpers.datasets import dialogue, mixed_pairs, packed_run
from tests.helpers.hf_trainers import (
    OPTIMIZER,
    QUIET,
    Run,
    number_of,
    several_packs,
    with_processor,
)
from tests.helpers.pages import blocks
from tests.helpers.peers import (
    check_losses,
    open_packs,
    pack_dialogues,
    stored_samples,
    token_losses_alone,
)
from tests.helpers.rank_processes import run_ranks
from tests.helpers.shared_media import few_trees
from tests.helpers.tiny_families import encoder_options
from tests.peers import Say
from tests.peers.laws import CommandLaws, PackingLaws, Rows, TrainingLaws
from tests.world import World

PAGE = Path(__file__).parents[2] / "docs/recipes.md"
#: A CPU in place of a GPU, and the optimizer of `our_losses`.
ON_A_CPU: dict[str, Any] = {
    **QUIET,
    **OPTIMIZER,
    "bf16": False,
    "flash_attn": "sdpa",
    "eval_dataset": None,
    "eval_strategy": "no",
    "freeze_vision_tower": False,
    "freeze_multi_modal_projector": False,
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
    """Numbers of the packs trained, losses of steps and validations, and the weights at the end; of
    other data only the losses, and the number of samples.

    Args:
        reads: reads an epoch before the first step; the numbers are those of its packs.
    """

    def __init__(self, packed: Path | None, *, reads: bool = False) -> None:
        self._packs = open_packs(packed, trees=True) if packed else None
        self._reads = reads
        self.numbers: list[int] = []
        self.losses: list[float] = []
        self.validation: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.samples = 0

    def _add(self, inputs: dict[str, Any]) -> None:
        if self._packs is not None:
            self.numbers.append(number_of(inputs["input_ids"], self._packs))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rows = kwargs["train_dataloader"]
        self.samples = len(rows.dataset)
        if self._reads:
            for row in rows:
                self._add(row)
        else:
            kwargs["model"].register_forward_pre_hook(
                lambda _, __, given: self._add(given), with_kwargs=True
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.validation.append(kwargs["metrics"]["eval_loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        self.weights = [weight.detach().clone() for weight in kwargs["model"].parameters()]


def train(checkpoint: Path, packed: Path, output: Path, **options: Any) -> Recorder:
    """A run of LLaMA-Factory's command."""
    recorder = Recorder(packed)
    tuner.run_exp(recipe(checkpoint, packed, output, **options), [recorder])
    return recorder


def run(
    checkpoint: Path, packed: Path, output: Path, resume: Path | None = None, **options: Any
) -> Run:
    """Packs and loss of each of six steps, and the weights at the end."""
    shutdown_parallel()  # of an earlier `launch.train`: it would leave the process group only
    name = AutoConfig.from_pretrained(checkpoint).model_type
    options |= {"template": name.removesuffix("_moe"), "max_steps": 6, "save_steps": 3}
    if resume:
        options["resume_from_checkpoint"] = str(resume)
    recorder = train(checkpoint, packed, output, **options)
    return recorder.numbers, recorder.losses, recorder.weights


def numbers_read(packed: Path, checkpoint: Path, output: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    order = Recorder(packed, reads=True)
    folder = output / os.environ["WORLD_SIZE"]  # it goes on in a folder that has a run
    arguments = recipe(checkpoint, packed, folder, max_steps=1, save_strategy="no")
    tuner.run_exp(arguments, [order])
    return order.numbers


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


VERSION = f"LLaMA-Factory {version('llamafactory')}"
FAMILY = "qwen2_vl"


@pytest.fixture(scope="module")
def case(case: Any) -> Any:
    with_processor(case[0])
    return case


class TestTraining(TrainingLaws):
    run = staticmethod(run)
    read = staticmethod(numbers_read)
    prepare = staticmethod(with_processor)
    families = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_with_fa2_it_gives_recurrent_layers_the_boundaries(
    family: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others our trainer does. (Without flash attention it goes on with sdpa.)"""
    checkpoint, packed = several_packs(family, tmp_path)
    with_processor(checkpoint)
    with monkeypatch.context() as patch:  # it changes classes, also those of the samples alone
        layers = [dense.Qwen3_5DecoderLayer, dense.Qwen3_5GatedDeltaNet]
        layers += [mixture.Qwen3_5MoeDecoderLayer, mixture.Qwen3_5MoeGatedDeltaNet]
        for layer in layers:
            patch.setattr(layer, "forward", layer.forward)
        _, losses, _ = run(checkpoint, packed, tmp_path / "out", flash_attn="fa2")
        changed = sum("llamafactory" in layer.forward.__module__ for layer in layers)
    assert changed == 2 * family.startswith("qwen3_5")
    say(f"fa2: {check_losses(packed, checkpoint, losses)}")


def test_samples_that_share_prefixes(world: World, tmp_path: Path, say: Say) -> None:
    made, trees, _ = few_trees(world, FAMILY)
    checkpoint = with_processor(shutil.copytree(made, tmp_path / "model"))
    packs = open_packs(trees, trees=True)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    alone = token_losses_alone(model, packs, 0).mean().item()
    trained = train(checkpoint, trees, tmp_path / "run", max_steps=1)
    assert trained.numbers == [0]
    assert trained.losses == pytest.approx([alone], abs=1e-5)
    say("a pack of branches has the loss of their samples alone")


#: Options of the documented recipe that the other tests leave out.
AS_WRITTEN: Mapping[str, Any] = {"freeze_vision_tower": None, "freeze_multi_modal_projector": None}


def rank_run(folders: tuple[Path, Path, Path], options: Any) -> tuple[list[int], list[float]]:
    """Packs and losses of a rank."""
    recorder = train(*folders, save_strategy="no", **options)
    return recorder.numbers, recorder.losses


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
    folders, steps = (checkpoint, packed, tmp_path / "two"), {"max_steps": 4}
    ranks = run_ranks(2, tmp_path / "ranks", rank_run, folders, steps)
    assert [numbers for numbers, _ in ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    alone = rank_run((*folders[:2], tmp_path / "one"), steps | {"gradient_accumulation_steps": 2})
    assert alone[0] == list(range(8))
    difference = max(abs(a - b) for a, b in zip(alone[1], ranks[0][1], strict=True))
    assert difference < 1e-4
    say(f"two ranks, some steps with images on one alone, as one (to {difference:.0e})")


@pytest.mark.parametrize("options", [{}, {"finetuning_type": "lora"}])
def test_two_ranks_train_as_documented(
    options: dict[str, Any], case: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the vision tower frozen, which is LLaMA-Factory's default."""
    folders, options = (*case, tmp_path / "out"), {**AS_WRITTEN, **options, "max_steps": 2}
    ranks = run_ranks(2, tmp_path / "ranks", rank_run, folders, options)
    assert [numbers for numbers, _ in ranks] == [[0, 2], [1, 3]]
    assert len(ranks[0][1]) == 2


class TestPacking(PackingLaws):
    def rows(self, packs: PackedFolder, task: str, folder: Path) -> Iterator[Rows]:
        """With `neat_packing`, which sorts samples by length."""
        vision, seq_length = packs.task_encoder.encoder.options, packs.task_encoder.seq_length
        processor = builtin_processor(min_pixels=vision.min_pixels, max_pixels=vision.max_pixels)
        processor.image_max_pixels, processor.image_min_pixels = 10**9, 1  # the processor's own
        name = CAPTIONS if task == "captioning" else "qwen2_vl"
        given = {"tokenizer": processor.tokenizer, "processor": processor}
        arguments = DataArguments(template=name, neat_packing=True)
        given["template"] = get_template_and_fix_tokenizer(processor.tokenizer, arguments)
        collate = SFTDataCollatorWith4DAttentionMask(
            model=tiny_qwen2_vl(),  # for the positions of M-RoPE
            pad_to_multiple_of=8,
            block_diag_attn=True,
            neat_packing=True,
            attn_implementation="flash_attention_2",  # with others it builds a mask
            **given,
        )
        ends = processor.tokenizer.convert_tokens_to_ids(["<|im_end|>", "Ċ"])
        for number, stored in enumerate(packs):
            samples = list(stored_samples(stored))
            # One less than the user's option, as DataArguments does for packing.
            arguments.cutoff_len = seq_length + 8 * len(samples) - 1
            packing = PackedSupervisedDatasetProcessor(**given, data_args=arguments)
            columns = packing.preprocess_dataset(own_arguments(samples))
            pack = {name: one for name, (one,) in columns.items()}
            yield without_newlines(collate([dict(pack)]), pack, *ends), as_its_row(packs, number)


def as_its_row(packs: PackedFolder, number: int) -> dict[str, Any]:
    """Our row with its samples as its knapsack takes them: the longest first, and of equal ones the
    last."""
    row = packs.row(number).row
    lengths = row.cu_lengths.diff().tolist()
    order = sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], -sample))
    ours = merge_rows([split_row(row)[sample] for sample in order])
    positions = segment_kwargs(ours.position_ids[:, None], ours.cu_lengths)["position_ids"]
    # Its first row, which should count tokens, is M-RoPE's time.
    positions[0] = positions[1]
    expected = {
        "input_ids": ours.tokens,
        "labels": ours.labels,
        "boundaries": ours.cu_lengths,
        "position_ids": positions,
    }
    if len(ours.image_grid_thw):  # to others it adds a masked image
        expected |= {"pixel_values": ours.pixel_values, "image_grid_thw": ours.image_grid_thw}
    return expected


def test_the_documented_recipe_validates_on_its_val_split(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    model = {"family": "qwen2_vl", "processor": str(case[0]), **encoder_options("qwen2_vl")}
    pairs = mixed_pairs(tmp_path / "source", 40)
    source = {"format": "pairs", "path": str(pairs), "task": "bmr"}
    sections = {"pack": {"seq_length": 512}, "output": {"split": {"train": 0.8, "val": 0.2}}}
    packed, output = tmp_path / "packed", tmp_path / "out"
    packed_run(source, packed, model=model, **sections)
    validation = {"eval_dataset": str(packed), "eval_strategy": "steps", "eval_steps": 2}
    recorder = Recorder(None)
    options = {"max_steps": 2, **AS_WRITTEN, **validation}
    tuner.run_exp(recipe(case[0], packed, output, **options), [recorder])
    packs = open_packs(packed, "val")
    assert recorder.samples == len(open_packs(packed)) > len(packs) > 0
    trained = AutoModelForImageTextToText.from_pretrained(output).eval()
    with torch.no_grad():
        rows = [to_transformers_kwargs(packs.batch([number])) for number in range(len(packs))]
        expected = sum(float(trained(**row).loss) for row in rows) / len(packs)
    assert recorder.validation[0] == pytest.approx(expected, abs=1e-4)


class TestCommand(CommandLaws):
    refused = (
        ({"packing": True}, "leave out packing"),
        ({"neat_packing": True}, "leave out packing, neat_packing"),
        ({"max_samples": 10, "mask_history": True}, "leave out max_samples, mask_history"),
        ({"dataset": "{packed},other"}, "name one dataset"),
        ({"eval_dataset": "other"}, "give packs as both"),
        ({"eval_dataset": "{packed}"}, "no packs in its val split"),
        ({"do_train": False}, "set do_train: true"),
        ({"pure_bf16": True}, "set bf16: true"),
    )

    def build(self, checkpoint: Path, packed: Path, output: Path, options: Any) -> Any:
        given = {
            name: value.format(packed=packed) if isinstance(value, str) else value
            for name, value in (options or {}).items()
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parser, "is_torch_bf16_gpu_available", lambda: True)
            return train(with_processor(checkpoint), packed, output, max_steps=1, **given)


def test_other_data_go_llama_factorys_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json"}}))
    records = [{"instruction": "Say", "input": text, "output": text} for text in "ab"]
    (tmp_path / "mine.json").write_text(json.dumps(records))
    recorder = Recorder(None)
    options = {"dataset": "mine", "dataset_dir": str(tmp_path), "max_steps": 1}
    tuner.run_exp(recipe(*case, tmp_path / "out", **options), [recorder])
    assert recorder.samples == 2
