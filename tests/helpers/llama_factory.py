"""LLaMA-Factory's runs on packs, from the recipe in the documentation, and what its own packing
makes of samples."""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
from llamafactory.data.formatter import StringFormatter
from llamafactory.data.mm_plugin import get_mm_plugin
from llamafactory.data.processor import PackedSupervisedDatasetProcessor
from llamafactory.data.template import TEMPLATES, register_template
from llamafactory.hparams import DataArguments
from PIL import Image, ImageOps
from transformers import TrainerCallback

from launch.trainers.llama_factory import tuner
from task_encoders.samples import SourceSample, place_media
from tests.helpers.datasets import dialogue
from tests.helpers.hf_trainers import number_of
from tests.helpers.markdown import blocks
from tests.helpers.peers import open_packs

PAGE = Path(__file__).parents[2] / "docs/integrations.md"
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
        self._packs = open_packs(packed)
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
