"""NeMo AutoModel on packs, and against what its own packing makes of the same samples: of images,
of videos, of families beside Qwen's, cut for context parallelism; its recipe of
docs/recipes.md, and what is wrong in others."""

import io
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from nemo_automodel._transformers.registry import ModelRegistry
from nemo_automodel._transformers.utils import resolve_get_rope_index
from nemo_automodel.cli.utils import resolve_recipe_name
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.components.datasets.vlm.collate_fns import neat_packed_vlm_collater
from nemo_automodel.components.datasets.vlm.datasets import PreTokenizedDatasetWrapperConfig
from nemo_automodel.components.datasets.vlm.loader import (
    VlmCollatorConfig,
    VlmDataloaderConfig,
    VlmProcessorConfig,
)
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import (
    NeatPackConfig,
    PackedDatasetWrapperConfig,
)
from nemo_automodel.components.distributed.context_parallel.utils import make_cp_batch_for_te
from nemo_automodel.components.distributed.cp_vision_frame_shard import _contiguous_balanced_bounds
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss
from nemo_automodel.components.models.common.packing import configure_packing_for_models
from nemo_automodel.components.utils.model_utils import filter_forward_kwargs
from nemo_automodel.recipes._dist_utils import parse_distributed_section
from nemo_automodel.recipes._typed_config import RecipeConfig
from nemo_automodel.recipes.vlm.finetune import FinetuneRecipeForVLM, _is_recipe_target
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

import launch.trainers.automodel
from launch.data.packed_data import read_packed_data
from launch.model.config import tiny_config, transformers_class
from launch.trainers.automodel import PacksConfig
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import build_sample_encoder
from task_encoders.families.builtin_processor import builtin_processor
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.media.video_file import read_video_header
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS
from tests.helpers.context_ranks import (
    boundaries,
    differing_cuts,
    packs_for_ranks,
    use_partitioned_indices,
)
from tests.helpers.hf_trainers import several_packs
from tests.helpers.pages import blocks
from tests.helpers.peers import (
    CAPTION_TEMPLATE,
    assert_same,
    check_losses,
    check_order,
    check_uniform_steps,
    open_packs,
    small_checkpoint,
    small_packs,
    stored_samples,
    two_losses,
)
from tests.helpers.videos import VIDEO_MODEL, video_packs
from tests.peers import Say, chat_of, check_loader_resumes
from tests.peers.laws import CommandLaws, PackingLaws, Rows


def _processor(**_: Any) -> Any:
    return builtin_processor()


def make_loader(packed: Path, split: str = "train", **options: Any) -> DataLoader[Any]:
    """Packs through AutoModel's loader on this rank, as a recipe makes it."""
    config = VlmDataloaderConfig(
        dataset_config=PacksConfig(str(packed), split),
        processor_config=VlmProcessorConfig(_processor),  # it asks for one
        pretokenization=PreTokenizedDatasetWrapperConfig(),
        packing=NeatPackConfig(read_packed_data(packed).seq_length),
        shuffle=False,
    )
    is_group = distributed.is_initialized()
    built = config.build(
        pretrained_model_name_or_path=None,  # the packs name theirs
        dp_rank=distributed.get_rank() if is_group else 0,
        dp_world_size=distributed.get_world_size() if is_group else 1,
        **{"batch_size": 1, **options},
    )
    loader: DataLoader[Any] = built.dataloader
    return loader


def without_last_newline(result: Any, processor: Any) -> Any:
    """The tokens that the template puts after the very last end of a turn."""
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        result[name] = result[name][:, :-1]
    return result


LIMITS = {"min_pixels": VIDEO_MODEL["min_pixels"], "max_pixels": VIDEO_MODEL["max_pixels"]}
PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor}
VISION: dict[str, dict[str, int]] = {"qwen2_vl": {}, "qwen2_5_vl": {"tokens_per_second": 2}}


def compared(
    task: str,
    packed: Path,
    split: str,
    images: Any,
    *,
    family: str = "qwen2_vl",
    as_video: Callable[[bytes], dict[str, Any]] | None = None,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Our batches, and what AutoModel packs of the same samples with this processor of images."""
    builtin, is_captions = builtin_processor(), task == "captioning"
    template = CAPTION_TEMPLATE if is_captions else builtin.chat_template
    videos = Qwen2VLVideoProcessor(fps=2.0, cap_pixels_per_frame=False, **LIMITS)
    processor = PROCESSORS[family](images, builtin.tokenizer, videos, chat_template=template)
    config = tiny_config(family, {}, VISION[family], **MEDIA_TOKEN_IDS)
    model = transformers_class(family)(config)
    encoding = PreTokenizedDatasetWrapperConfig(
        max_retries=1,
        inject_fake_images=False,
        post_tokenize_hook=None if is_captions else without_last_newline,
    )
    for pack, ours in zip(open_packs(packed, split), make_loader(packed, split), strict=True):
        samples = [{"conversation": chat_of(*stored)} for stored in stored_samples(pack)]
        for turn in (turn for sample in samples for turn in sample["conversation"]):
            for part in turn["content"]:
                if as_video and part["type"] == "video":
                    part |= as_video(part["video"])
        own = PackedDatasetWrapperConfig(pack_size=1 << 20).build(
            inner_dataset=encoding.build(dataset=samples, processor=processor),
            bins=[list(range(len(samples)))],
            padding_idx=0,
            get_rope_index=resolve_get_rope_index(model),
        )
        theirs = neat_packed_vlm_collater([own[0]])
        if is_captions:  # which it finds only between the headers of a dialogue
            assert (theirs.pop("labels") == -100).all()
            assert (ours.pop("labels") != -100).any()
        yield ours, theirs


def losses_of_packs(model: Any, packed: Path) -> list[float]:
    """Losses before and after a step through AutoModel's packing contract, loss and arguments of
    the model; its recipe needs a GPU."""
    contract = configure_packing_for_models([model])

    def loss_of(batch: dict[str, Any]) -> torch.Tensor:
        labels = batch.pop("labels")
        output = model(**filter_forward_kwargs(model, batch), use_cache=False)
        loss: torch.Tensor = calculate_loss(
            MaskedCrossEntropy(),
            logits=output.logits,
            labels=labels,
            model=model,
            num_label_tokens=int((labels != -100).sum()),
        )
        return loss

    return two_losses(model, make_loader(packed, packing_contract=contract), loss_of)


VERSION = f"NeMo AutoModel {version('nemo-automodel')}"


class TestPacking(PackingLaws):
    def rows(self, packs: PackedFolder, task: str, folder: Path) -> Iterator[Rows]:
        images = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=100352)
        for ours, theirs in compared(task, packs.path, packs.split, images):
            assert ours.keys() == theirs.keys()
            yield ours, theirs


def numbers_read(packed: Path) -> list[int]:
    """Numbers of the packs that this rank trains on in an epoch."""
    packs, numbers = PacksConfig(str(packed)).build(), []
    tokens = [packs[number]["input_ids"] for number in range(len(packs))]
    for batch in make_loader(packed):
        (number,) = (i for i, own in enumerate(tokens) if torch.equal(own, batch["input_ids"][0]))
        numbers.append(number)
    return numbers


def test_order(case: Any, tmp_path: Path, say: Say) -> None:
    say(check_order(case[1], tmp_path, numbers_read))


def images_read(packed: Path) -> list[bool]:
    """Whether each row that this rank trains on has images."""
    return [batch.get("pixel_values") is not None for batch in make_loader(packed)]


def test_uniform_steps(case: Any, family: str, tmp_path: Path, say: Say) -> None:
    say(check_uniform_steps(family, case[0], tmp_path, images_read))


def test_its_loader_goes_on_where_it_was_saved(case: Any, say: Say) -> None:
    say(check_loader_resumes(lambda: make_loader(case[1])))


def loaded_model(checkpoint: Path) -> Any:
    """The model that AutoModel makes of a checkpoint, in float32: of Qwen3.5 its own, of the others
    transformers'. Its `from_pretrained` needs a GPU."""
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa")
    if not model.config.model_type.startswith("qwen3_5"):
        return model
    (architecture,) = model.config.architectures
    own = ModelRegistry.model_arch_name_to_cls[architecture].from_pretrained(checkpoint).float()
    own.load_state_dict(own.state_dict_adapter.from_hf(model.state_dict()))
    return own


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "glm4v", "glm46v", "internvl3", "qwen3_vl", "qwen3_5", "qwen3_5_moe"]
)
def test_steps_are_those_of_the_samples_alone(family: str, tmp_path: Path, say: Say) -> None:
    """Also with pixels in bfloat16; of one family, those of `launch.train`."""
    checkpoint, packed = several_packs(family, tmp_path)
    losses = losses_of_packs(loaded_model(checkpoint), packed)
    how: Any = {"ours": tmp_path / "ours"} if family == "qwen2_5_vl" else {"pixels": torch.bfloat16}
    say(check_losses(packed, checkpoint, losses, **how))


of_qwen3_5 = pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)


@of_qwen3_5
def test_rows_of_two_packs_keep_boundaries(family: str, case: Any) -> None:
    """Padded to the longer of them, which recurrent layers must not see."""
    checkpoint, packed = case
    model = loaded_model(checkpoint)
    options = {"packing_contract": configure_packing_for_models([model])}
    two = next(iter(make_loader(packed, batch_size=2, **options)))
    padding = two["_packed_seq_ids"] == 0
    assert padding.any()
    two["input_ids"].masked_fill_(padding, 0)  # from a token of a larger vocabulary
    for place, one in enumerate(islice(make_loader(packed, **options), 2)):
        length = one["input_ids"].shape[1]
        ours, alone = (
            model(**filter_forward_kwargs(model, dict(batch)), use_cache=False).logits
            for batch in (two, one)
        )
        assert (ours[place, :length] - alone[0]).abs().max() < 1e-4
        assert torch.equal(two["labels"][place, :length], one["labels"][0])
        assert (two["labels"][place, length:] == -100).all()


@of_qwen3_5
@pytest.mark.parametrize(
    ("module", "package"),
    [("fla.ops.gated_delta_rule", "flash-linear-attention"), ("causal_conv1d", "causal-conv1d")],
)
def test_recurrent_layers_without_kernels_are_refused(
    module: str, package: str, family: str, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoModel goes on without, and its losses are other ones."""
    checkpoint, packed = case
    whole = losses_of_packs(loaded_model(checkpoint), packed)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"only by {module}, .* install {package}"):
        losses_of_packs(loaded_model(checkpoint), packed)
    monkeypatch.setattr(launch.trainers.automodel, "require_kernels", lambda *_: None)
    leaking = losses_of_packs(loaded_model(checkpoint), packed)
    assert max(abs(a - b) for a, b in zip(whole, leaking, strict=True)) > 1e-3


@of_qwen3_5
def test_recurrent_layers_of_transformers_are_refused(family: str, case: Any) -> None:
    model = AutoModelForImageTextToText.from_pretrained(case[0], attn_implementation="sdpa")
    with pytest.raises(ValueError, match="leave out force_hf"):
        losses_of_packs(model, case[1])


@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified", "mistral3"])
def test_it_packs_no_gemma_and_no_mistral(family: str, tmp_path: Path) -> None:
    checkpoint = small_checkpoint(family, tmp_path / "checkpoint")
    packed = small_packs(family, checkpoint, tmp_path, samples=8)
    with pytest.raises(ValueError, match="AutoModel does not pack this model's images"):
        PacksConfig(str(packed)).build()[0]


@pytest.mark.parametrize("family", PROCESSORS)
def test_packs_with_videos_are_what_its_packing_would_give(
    task: str, family: str, tmp_path: Path, say: Say
) -> None:
    """It is told which frames to take: by itself it takes those of qwen-vl-utils."""
    packed = video_packs(task, tmp_path, family=family)
    encoder = build_sample_encoder(family, **VIDEO_MODEL)

    def as_video(data: bytes) -> dict[str, Any]:
        file = tmp_path / f"{hash(data)}.mp4"
        file.write_bytes(data)
        frames = encoder.sample_video(read_video_header(io.BytesIO(data))).frames
        return {"video": str(file), "frame_indices": list(frames)}

    images, num_videos, other_positions = Qwen2VLImageProcessor(**LIMITS), 0, []
    for ours, theirs in compared(task, packed, "train", images, family=family, as_video=as_video):
        num_videos += len(ours.get("video_grid_thw", ()))
        if family == "qwen2_5_vl":
            # It counts seconds as if every frame of the file had been taken.
            seconds = theirs.pop("second_per_grid_ts", torch.empty(0))
            assert {round(2 / float(step)) for step in seconds} <= {10, 3}  # frames per second
            other = (theirs.pop("position_ids") != ours.pop("position_ids")).any()
            assert not other or "video_grid_thw" in ours
            other_positions.append(bool(other))
        assert ours.keys() == theirs.keys()
        assert_same(ours, theirs, f"{task} of {family}")
    assert num_videos >= 12
    assert any(other_positions) == (family == "qwen2_5_vl")
    but = f", but for the seconds in positions of {sum(other_positions)}" * any(other_positions)
    say(f"{family} packs of {task} with {num_videos} videos as its own{but}")


@pytest.mark.parametrize("size", [2, 4])
def test_its_cut_gives_each_rank_what_it_should(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    """Tokens by Transformer Engine's indices; frames one after another, one at least."""
    use_partitioned_indices(monkeypatch)

    def cut(row: PackedBatch, params: PackedSeqParams) -> dict[str, torch.Tensor]:
        lengths = boundaries(params).diff()[None]
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        parts = []
        for positions in row.position_ids:  # it takes one axis at a time
            batch = {
                "input_ids": row.tokens,
                "labels": row.labels,
                "position_ids": positions,
                "seq_lens": lengths,
                "seq_lens_padded": lengths,
            }
            found = make_cp_batch_for_te(mesh, batch)
            assert torch.equal(found["cu_seqlens"], boundaries(params))
            parts.append(found["position_ids"])
        ids, labels = found["input_ids"], found["labels"]
        return {"tokens": ids, "labels": labels, "position_ids": torch.stack(parts)}

    packs = packs_for_ranks(tmp_path, size)
    assert differing_cuts(packs, size, cut) == []
    for number in range(len(packs)):
        row = packs.batch([number])
        grids = torch.cat([row.image_grid_thw, row.video_grid_thw])
        patches = grids[:, 1:].prod(dim=1).repeat_interleave(grids[:, 0])
        bounds = _contiguous_balanced_bounds(patches, size)
        assert (bounds is None) == (len(patches) < size)
        if bounds is not None:
            assert (np.diff(bounds) > 0).all()
            assert (bounds[0], bounds[-1]) == (0, len(patches))
    say(f"CP {size} cuts {len(packs)} packs as launch does")


PAGE = Path(__file__).parents[2] / "docs/recipes.md"
SEQ_LENGTH = 512


def parse(file: Path, checkpoint: Path, packed: Path, *overrides: str) -> RecipeConfig:
    """The recipe of the documentation, for this model and these packs, as the command parses it."""
    (text,) = [block.text for block in blocks(PAGE.read_text()) if "PacksConfig" in block.text]
    file.write_text(text)
    values = {
        "model.pretrained_model_name_or_path": checkpoint,
        "dataset.path": packed,
        "validation_dataset.path": packed,
        "validation_dataset.split": "train",  # these packs have no other
        "packed_sequence.pack_size": SEQ_LENGTH,
    }
    arguments = [f"--{name}={value}" for name, value in values.items()]
    return RecipeConfig(parse_args_and_load_config(str(file), argv=[*arguments, *overrides]))


def build(recipe: RecipeConfig, section: str = "vlm_dataloader", **options: Any) -> Any:
    """A loader as the recipe's class builds it."""
    config = getattr(recipe, section)
    config.processor_config = config.processor_config.__class__(_processor)
    return config.build(
        pretrained_model_name_or_path=recipe.model.pretrained_model_name_or_path,
        dp_rank=0,
        dp_world_size=1,
        batch_size=recipe.get("step_scheduler.local_batch_size"),
        **options,
    ).dataloader


def test_the_documented_recipe_is_parsed_whole(case: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case)
    target = resolve_recipe_name(recipe.recipe)
    assert target == f"{FinetuneRecipeForVLM.__module__}.FinetuneRecipeForVLM"
    assert _is_recipe_target(recipe.model.get("_target_"))
    assert recipe.step_scheduler.global_batch_size == 64
    assert recipe.optimizer.kwargs["lr"] == 1e-5
    assert recipe.checkpoint.checkpoint_dir == "out/trained"
    recipe.loss_fn.build()
    parse_distributed_section(recipe.distributed.to_dict())


def test_training_and_validation_read_the_same_rows(
    case: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case, "--dataloader.num_workers=0")
    model = AutoModelForImageTextToText.from_pretrained(case[0], attn_implementation="sdpa")
    contract = configure_packing_for_models([model])
    rows = list(build(recipe, packing_contract=contract))
    validation = list(build(recipe, "vlm_validation_dataloader", packing_contract=contract))
    assert len(rows) == len(validation) > 3
    for number, (row, other) in enumerate(zip(rows, validation, strict=True)):
        assert row.keys() == other.keys()
        assert_same(row, other, f"pack {number}")


ALREADY = "packed is packed already: .*"


class TestCommand(CommandLaws):
    refused = (
        (("--dataloader.shuffle=true", {}), ALREADY + r"set dataloader: \{shuffle: false\}"),
        (("--packed_sequence.pack_size=8192", {}), ALREADY + r"\{pack_size: 512\}"),
        (("--packed_sequence.pack_size=0", {}), ALREADY + r"\{pack_size: 512\}"),
        (("--packed_sequence.max_packs=9", {}), ALREADY + "and no max_packs"),
        (("--packed_sequence.packing_format=thd", {"cp_size": 2}), ALREADY + "format: neat"),
        (("--dataset.split=val", {}), "packed has no packs in its val split"),
    )

    def build(self, checkpoint: Path, packed: Path, output: Path, options: Any) -> Any:
        override, given = options or ("--dataset.split=train", {})
        return build(parse(output / "recipe.yaml", checkpoint, packed, override), **given)


def test_other_datasets_go_automodels_way(case: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = parse(tmp_path / "recipe.yaml", *case, "--packed_sequence.pack_size=0")
    config = recipe.vlm_dataloader
    config.dataset_config = SimpleNamespace(build=lambda: ["a", "b", "c"])
    config.collator = VlmCollatorConfig(lambda examples, processor: examples)
    config.shuffle, config.num_workers = True, 0
    assert sorted(itertools.chain.from_iterable(build(recipe))) == ["a", "b", "c"]
