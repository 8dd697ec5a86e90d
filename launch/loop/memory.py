"""The memory that a rank needs for a training step, told before weights are read.

Weights, gradients and the optimizer follow from shapes. What the layers keep for the backward pass
depends on kernels, fusions, autocast and frozen parts, so it is not calculated but seen: a model of
the same widths, with few layers and weights of no meaning, runs its forward pass on rows of one,
two and three samples, and the tensors that autograd saves are counted. The three make a polynomial
in the number of tokens (masks of attention are quadratic), which tells the bytes of the longest
row.
"""

import copy
import io
import logging
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from megatron.core import parallel_state
from PIL import Image
from torch import distributed, nn
from torch.autograd.graph import saved_tensors_hooks

from launch.config import LaunchConfig
from launch.data.packed_data import PackedData
from launch.loop.loss import shift_labels
from launch.model.config import TransformersModelConfig, part_of, transformers_classes
from launch.model.megatron_model import LOSS_CHUNK, build_parts, layer_stacks, model_outline
from launch.model.prefix_trees import segment_params
from offline_packing.errors import StageError
from task_encoders.concatenate import concatenate
from task_encoders.energon_samples import PackedBatch, PackedRowSample, batch_rows
from task_encoders.families import FAMILIES, model_cost
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.sample_encoder import EncodedSample, SampleEncoder
from task_encoders.samples import SourceSample, Turn

logger = logging.getLogger(__name__)

_GIB: Final = 2**30
#: Share of a device that steps may fill before layers are recomputed: kernels need room to work in,
#: and an allocator leaves gaps.
_FILLED: Final = 0.9
#: Numbers in a tensor below which it is written.
_SMALL: Final = 1 << 20
#: Numbers of samples in the rows that are run; a parabola has three coefficients.
_ROWS: Final = (1, 2, 3)


def device_bytes(device: torch.device) -> int | None:
    """Memory of a device that this process can have; None on a CPU, whose memory is shared."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device)


@dataclass
class Saved:
    """Bytes that autograd saves in one forward pass."""

    #: in the layers of "language" and "vision" that were run, in the "pictures" around the layers
    #: of vision, and in the "rest"
    kept: Counter[str] = field(default_factory=Counter)
    #: the inputs of the layers, which are all that recomputed layers keep
    inputs: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Outline:
    """A whole model's sizes on a rank."""

    #: bytes of its weights
    weights: int
    #: its weights by number, and those that are trained
    num_weights: int
    num_trained: int
    #: layers, of "language" and "vision"; and those that the shallow model has
    layers: Mapping[str, int]
    kept: Mapping[str, int]
    #: weights outside of the layers that are sharded one by one, and in the largest, by number
    num_outside: int
    num_largest: int
    #: those outside that are trained; and the head's, if it is, by number
    num_trained_outside: int
    num_trained_head: int
    #: bytes of a weight that layers compute with
    itemsize: int


def saved_bytes(model: Any, batch: PackedBatch) -> Saved:
    """Count what autograd saves in a model's forward pass for a row without labels. Weights, and
    the row itself, do not count; a tensor that is saved twice counts once.

    Args:
        model: as a `Trainer` takes it.
    """
    saved, place = Saved(), ["rest"]
    tensors = [*model.parameters(), *model.buffers(), *vars(batch).values()]
    known = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    held = []  # so that no later tensor gets its memory

    def count(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()  # what knew its graph would be held by it, and never be freed
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            held.append(tensor)
            saved.kept[place[-1]] += storage.nbytes()
        return tensor

    def enter(part: str, _module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        saved.inputs[part] += next(iter([*given, *named.values()])).nbytes
        place.append(part)

    whole = getattr(model, "whole", model)
    scopes = [(part, layer) for part, layers in layer_stacks(whole) for layer in layers]
    for name, module in whole.named_modules():
        above = name.rpartition(".")[0]
        if part_of(f"{name}.") != "language" and part_of(f"{above}.") == "language":
            scopes.append(("pictures", module))
    handles: list[Any] = []
    for part, module in scopes:
        begin = partial(enter, part)
        handles += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(lambda *_: place.pop() and None),
        ]
    with saved_tensors_hooks(count, lambda tensor: tensor):
        model(
            tokens=batch.tokens,
            position_ids=batch.position_ids,
            packed_seq_params=segment_params(batch, None),
            imgs=batch.imgs,
            image_grid_thw=batch.image_grid_thw,
            labels=torch.full_like(shift_labels(batch.labels), IGNORE_INDEX),
            pixel_values_videos=batch.pixel_values_videos,
            video_grid_thw=batch.video_grid_thw,
        )
    for handle in handles:
        handle.remove()
    return saved


def shallow_model(config: LaunchConfig, options: Mapping[str, Any]) -> tuple[Any, Outline]:
    """A model like that of a run, with one layer of each kind and weights of no meaning; and the
    sizes of the whole.

    Args:
        options: of `build_model` or `build_transformers_model`.
    """
    model, device = config.model.model_copy(update={"recompute": "none"}), options["device"]
    if isinstance(model, TransformersModelConfig):
        return _shallow_transformers_model(model, **options)
    dtype = model.resolve_dtype(device)
    whole = model_outline(model).to(dtype)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(part_of(name) not in model.freeze)
    # Rows without pictures do not go through the tower's layers, so these are no units.
    kept = {"language": 1, "vision": 1}
    outline = _outline_of(whole, dtype, config.parallel.tensor, kept, units={"language"})
    sizes = copy.deepcopy(whole.config)
    text, vision = sizes.text_config, sizes.vision_config
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    text.num_hidden_layers = 1
    _with_one_layer(vision)
    with torch.device("meta"):
        shallow = transformers_classes(model.family).model(sizes)
    built, _ = build_parts(model, shallow, **{k: v for k, v in options.items() if k != "seed"})
    return built.train(), outline


def _shallow_transformers_model(
    config: TransformersModelConfig,
    *,
    device: torch.device,
    seed: int,
    trees: bool,
    tokenizer: Any,
    **packs: Any,
) -> tuple[Any, Outline]:
    from launch.model.transformers_model import PackedTransformersModel, make_model

    dtype = config.resolve_dtype(device)
    whole = make_model(config, device, dtype, seed, trees, packs, outline=True)
    layout = FAMILIES[config.family].build.IMAGE_LAYOUT
    model = PackedTransformersModel(whole, dtype, image_layout=layout)
    kinds = getattr(model.hf_config.get_text_config(), "layer_types", None) or [""]
    kept = {"language": 1 + max(map(kinds.index, kinds)), "vision": 1}  # until each kind was there
    outline = _outline_of(model.whole, dtype, 1, kept, units=set(kept))
    for part, layers in list(layer_stacks(model.whole)):
        del layers[kept[part] :]
    _with_one_layer(model.hf_config.vision_config)
    if config.fsdp:  # it gathers weights in this dtype; otherwise autocast keeps copies in it
        model = model.to(dtype)
    model._apply(partial(_filled, device=device))
    return model.train(), outline


def _filled(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in the place of one without memory. A small one may hold places, such as of patches,
    that a model looks up; a large one is not written, and takes no memory where it is not read."""
    is_small = tensor.numel() < _SMALL
    return (torch.zeros_like if is_small else torch.empty_like)(tensor, device=device)


def _with_one_layer(vision_config: Any) -> None:
    for name in {"depth", "num_hidden_layers"} & set(vision_config.to_dict()):
        setattr(vision_config, name, 1)
    if getattr(vision_config, "deepstack_visual_indexes", None):
        vision_config.deepstack_visual_indexes = [0]


def _outline_of(
    model: nn.Module,
    dtype: torch.dtype,
    tensor_parallel: int,
    kept: Mapping[str, int],
    *,
    units: Container[str],
) -> Outline:
    """The sizes of a model of transformers, whose language model is divided by tensor parallel
    ranks, and which computes in `dtype`; layers of `units` are sharded one by one."""
    share = {"language": tensor_parallel}
    counts = Counter[str]()
    for name, parameter in model.named_parameters():
        number = parameter.numel() // share.get(part_of(name), 1)
        counts["all"] += number
        counts["weights"] += number * parameter.itemsize
        if parameter.requires_grad:
            counts["trained"] += number
    layers, largest = Counter({"language": 0, "vision": 0}), 0
    for part, stack in layer_stacks(model):
        layers[part] += len(stack)
        for layer in stack if part in units else ():
            sizes = [(p.numel() // share.get(part, 1), p.requires_grad) for p in layer.parameters()]
            size = sum(number for number, _ in sizes)
            largest, counts["inside"] = max(largest, size), counts["inside"] + size
            counts["trained_inside"] += sum(number for number, is_trained in sizes if is_trained)
    head: nn.Parameter = model.lm_head.weight  # type: ignore[assignment, union-attr]
    return Outline(
        weights=counts["weights"],
        num_weights=counts["all"],
        num_trained=counts["trained"],
        layers=layers,
        kept=kept,
        num_outside=counts["all"] - counts["inside"],
        num_largest=largest,
        num_trained_outside=counts["trained"] - counts["trained_inside"],
        num_trained_head=head.numel() // tensor_parallel if head.requires_grad else 0,
        itemsize=dtype.itemsize,
    )


def longest_row(config: LaunchConfig, data: PackedData) -> tuple[int, float]:
    """Tokens on this rank of the longest row of packs, and the most patches that a row can hold by
    the operations in the manifests; infinite: they do not tell."""
    packs = config.data.micro_batch_size
    patches = float("inf")
    if data.tower_flops is not None:
        patches = packs * data.tower_flops / model_cost(data.model).tower_flops(1)
    context = config.parallel.context
    return packs * data.seq_length // context, patches / context


def probe_sample(encoder: SampleEncoder, *, has_media: bool) -> EncodedSample:
    """A caption of some words, and a picture where packs have any."""
    turn, file = Turn("", "a picture of a street in the rain " * 8), io.BytesIO()
    Image.new("RGB", (224, 224)).save(file, "PNG")
    images = ("picture",) if has_media else ()
    sample = SourceSample("probe", "captioning", (turn,), images)
    return encoder.encode(sample, [file.getvalue()] * len(images))


def row_of(samples: list[EncodedSample], device: torch.device) -> PackedBatch:
    """A row on a device, its pixels as values."""
    row = PackedRowSample(
        __key__="row",
        __restore_key__=(),
        __subflavors__=None,
        row=concatenate(samples, pad_token_id=0),
        sub_sample_keys=[sample.key for sample in samples],
        dropped=[],
    )
    return batch_rows([row]).to(device)


def estimate(
    config: LaunchConfig, data: PackedData, encoder: SampleEncoder, options: Mapping[str, Any]
) -> dict[str, list[dict[str, int]]]:
    """Bytes of this rank when it trains the longest row, by what takes them. Between the two
    moments layers' memory turns into gradients', so one of them is the peak. Under tensor
    parallelism a collective.

    Returns:
        For recompute "none" and "full", what is held at the end of the forward pass, and at the end
        of the backward pass.
    """
    model, outline = shallow_model(config, options)
    device, vocab_size = options["device"], model.hf_config.get_text_config().vocab_size
    sample = probe_sample(encoder, has_media=data.has_media)
    rows = [row_of([sample] * number, device) for number in _ROWS]
    found = [saved_bytes(model, row) for row in rows]

    tokens, patches = longest_row(config, data)
    longest = tokens / len(sample.tokens)
    times = {"language": longest, "rest": longest, "vision": 0.0, "pictures": 0.0}
    if own_patches := int(sample.image_grid_thw.prod(axis=1).sum()):
        times["vision"] = times["pictures"] = min(longest, patches / own_patches)

    def extrapolated(name: str, part: str, times: float) -> float:
        values = [getattr(one, name)[part] for one in found]
        return float(np.polynomial.Polynomial.fit(_ROWS, values, len(_ROWS) - 1)(times))

    kept = {part: extrapolated("kept", part, times[part]) for part in times}
    number = {part: count / outline.kept[part] for part, count in outline.layers.items()}
    layers = {part: kept[part] * number[part] for part in number}
    inputs = {part: extrapolated("inputs", part, times[part]) * number[part] for part in number}
    # What layers keep of no row at all: weights in the dtype of autocast, which holds them until
    # the forward pass ends.
    copies = sum(extrapolated("kept", part, 0.0) * number[part] for part in number)
    words, head = vocab_size // config.parallel.tensor, outline.num_trained_head
    around = {
        "rest": kept["rest"] + kept["pictures"],
        # In float32, with their gradients; and the head's gradient of all chunks, beside of one.
        "logits": words * min(LOSS_CHUNK, tokens) * 2 * 4 + head * (4 + outline.itemsize),
        "pixels": times["vision"] * rows[0].imgs.nbytes * 5 / 4,  # bytes, and values
    }
    always = _held_always(config, outline)
    after = {
        **always,
        # Of layers they are on their ranks by now; of the rest their sums are being made.
        "gradients": outline.num_trained_outside * (outline.itemsize + 2 * 4),
        "one layer": max(kept[part] / outline.kept[part] for part in number),
    }
    moments = {"none": [{**always, **layers, **around}, after]}
    moments["full"] = [{**always, **inputs, "copies of weights": copies, **around}, after]
    return {
        name: [{part: int(size) for part, size in one.items()} for one in both]
        for name, both in moments.items()
    }


def _held_always(config: LaunchConfig, outline: Outline) -> dict[str, int]:
    """Gathered weights and those that are not trained; and the shards of `ShardedAdamW`: weights,
    sums of gradients and two moments, in float32."""
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    weights, shards = outline.weights, 16 * outline.num_trained // ranks
    if getattr(config.model, "fsdp", False):
        weights = (outline.num_outside + 2 * outline.num_largest) * outline.itemsize
        shards += 4 * (outline.num_weights - outline.num_trained) // ranks
    return {"weights": weights, "optimizer": shards}


def settle_recompute(
    config: LaunchConfig, data: PackedData, encoder: SampleEncoder, options: Mapping[str, Any]
) -> LaunchConfig:
    """The run with `model.recompute: auto` settled: full only where steps need more than most of
    the device. What a step needs is logged beside what the device has. A collective.

    Args:
        options: of `build_model` or `build_transformers_model`.

    Raises:
        StageError: steps cannot fit.
    """
    asked, chosen, device = config.model.recompute, "none", options["device"]
    if (own := device_bytes(device)) is not None:
        least = torch.tensor(own, device=device)
        distributed.all_reduce(least, distributed.ReduceOp.MIN)  # ranks recompute alike
        available = int(least)
        needed = estimate(config, data, encoder, options)
        torch.cuda.empty_cache()
        peaks = {
            name: max(moments, key=lambda one: sum(one.values()))
            for name, moments in needed.items()
        }
        totals = {name: sum(parts.values()) for name, parts in peaks.items()}
        is_full = asked == "full" or (asked == "auto" and totals["none"] > _FILLED * available)
        chosen = "full" if is_full else "none"
        parts = sorted(peaks[chosen].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts)
        text = (
            f"a step of {longest_row(config, data)[0]:,} tokens needs {totals[chosen] / _GIB:.1f} "
            f"of {available / _GIB:.1f} GiB with model.recompute={chosen}: {listed}"
        )
        if totals[chosen] > available:
            helps = totals["full"] <= available
            raise StageError(f"{text}; {'set model.recompute=auto' if helps else _remedy(config)}")
        logger.info("%s", text)
    elif asked != "auto":
        chosen = asked
    model = config.model.model_copy(update={"recompute": chosen})
    return config.model_copy(update={"model": model})


def _remedy(config: LaunchConfig) -> str:
    """Options that make a step smaller, from the least to the greatest change."""
    model, found = config.model, []
    if config.data.micro_batch_size > 1:
        found.append("data.micro_batch_size=1")
    if not isinstance(model, TransformersModelConfig):
        found.append(f"parallel.tensor={2 * config.parallel.tensor}")
    elif not model.fsdp:
        found.append("model.fsdp=true on several ranks")
        if model.lora is None:
            found.append("model.lora.rank=16")
    return f"set {', or '.join([*found, 'more ranks, or pack to a shorter seq_length'])}"
