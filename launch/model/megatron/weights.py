"""Hugging Face checkpoint folders, and their tensors as megatron-core's parameters.

config.json  generation_config.json  tokenizer.json …  preprocessor_config.json
model.safetensors                                       or
model-00001-of-00002.safetensors …  model.safetensors.index.json

Names are as in Qwen2-VL's published checkpoints (`model.layers.0…`, `visual.…`, `lm_head.weight`).
Every Hugging Face tensor is cut along one dimension or not at all over tensor parallel ranks, so
that a rank reads only its own slice, and gathering is a concatenation:

    mcore parameter   Hugging Face tensors   cut along   put together
    linear_qkv        q_proj k_proj v_proj   0           per group: its query heads, key, value
    linear_fc1        gate_proj up_proj      0           gate above up
    linear_proj, fc2  o_proj, down_proj      1           unchanged
    embedding, head   the same               0           unchanged
    norms             the same               -           unchanged
    vision tower      the same               -           unchanged
"""

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from megatron.core import parallel_state
from safetensors import safe_open

from launch.model.config import part_of
from launch.model.packed_model import replace_folder, write_companions
from task_encoders.families.base.family import TensorNames

Tensors = list[torch.Tensor]
#: (name, dim, rank, size) -> the rank-th of `size` equal slices of a tensor along `dim`; None: the
#: whole
ReadSlice = Callable[[str, int | None, int, int], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class WeightRule:
    """Rule that makes one parameter from Hugging Face tensors."""

    names: tuple[str, ...]
    #: dimension along which tensor parallel ranks share the tensors
    dim: int | None
    #: this rank's slices -> this rank's parameter, and back
    join: Callable[[Tensors], torch.Tensor] = lambda parts: parts[0]
    split: Callable[[torch.Tensor], Tensors] = lambda parameter: [parameter]


def join_qkv(parts: Tensors, head_dim: int) -> torch.Tensor:
    """Join query (H·D, …), key and value (G·D, …) to megatron-core's linear_qkv, ((H + 2·G)·D, …):
    for each of the G groups its H / G query heads, then its key, then its value."""
    groups = parts[1].shape[0] // head_dim
    grouped = [part.unflatten(0, (groups, -1)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def split_qkv(parameter: torch.Tensor, head_dim: int, heads_per_group: int) -> Tensors:
    """Undo join_qkv."""
    sizes = [heads_per_group * head_dim, head_dim, head_dim]
    grouped = parameter.unflatten(0, (-1, sum(sizes)))
    return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


def head_dim_of(text_config: Any) -> int:
    """Return the number of channels of an attention head."""
    given = getattr(text_config, "head_dim", None)
    return int(given or text_config.hidden_size // text_config.num_attention_heads)


#: Parameters of a layer that are a single tensor in both: published name, and dimension of the cut.
_ALONE: Final = {
    "self_attention.linear_proj": ("self_attn.o_proj", 1),
    "self_attention.q_layernorm": ("self_attn.q_norm", None),
    "self_attention.k_layernorm": ("self_attn.k_norm", None),
    "mlp.linear_fc2": ("mlp.down_proj", 1),
    "input_layernorm": ("input_layernorm", None),
    "pre_mlp_layernorm": ("post_attention_layernorm", None),
}


def model_rules(model: torch.nn.Module, hf_config: Any) -> dict[str, WeightRule]:
    """Return the rule of every parameter of a `PackedMegatronModel`, and of biases and norms that
    only some families have."""
    text_config = hf_config.text_config
    heads, groups = text_config.num_attention_heads, text_config.num_key_value_heads
    head_dim = head_dim_of(text_config)
    qkv = partial(join_qkv, head_dim=head_dim)
    un_qkv = partial(split_qkv, head_dim=head_dim, heads_per_group=heads // groups)
    rules = {
        "embedding.word_embeddings.weight": WeightRule(("model.embed_tokens.weight",), 0),
        "decoder.final_layernorm.weight": WeightRule(("model.norm.weight",), None),
    }
    if not hf_config.tie_word_embeddings:
        rules["output_layer.weight"] = WeightRule(("lm_head.weight",), 0)
    for i in range(text_config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias"):
            names = tuple(f"{theirs}self_attn.{part}_proj.{kind}" for part in "qkv")
            rules[f"{ours}self_attention.linear_qkv.{kind}"] = WeightRule(names, 0, qkv, un_qkv)
        gate_up = (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")
        rules[f"{ours}mlp.linear_fc1.weight"] = WeightRule(
            gate_up, 0, torch.cat, lambda parameter: list(parameter.chunk(2))
        )
        for name, (published, dim) in _ALONE.items():
            rules[f"{ours}{name}.weight"] = WeightRule((f"{theirs}{published}.weight",), dim)
    rules = {f"language_model.{name}": rule for name, rule in rules.items()}
    for name, _ in model.named_parameters():
        if name.startswith("visual."):
            rules[name] = WeightRule((published_name(name),), None)
    return rules


@torch.no_grad()
def load_weights(model: torch.nn.Module, hf_config: Any, read: ReadSlice) -> None:
    """Fill this rank's parameters, and mark those that tensor parallel ranks divide. Raises
    ValueError if a tensor that is read has another shape than the model's."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    rules = model_rules(model, hf_config)
    for name, parameter in model.named_parameters():
        rule = rules[name]
        value = rule.join([read(part, rule.dim, rank, size) for part in rule.names])
        if value.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(rule.names)}: shape {tuple(value.shape)} on this rank, the model has "
                f"{tuple(parameter.shape)}; config.json and weights do not belong together"
            )
        parameter.copy_(value)
        parameter.tensor_model_parallel = rule.dim is not None and size > 1  # type: ignore[attr-defined]


@torch.no_grad()
def gather_weights(
    model: torch.nn.Module, hf_config: Any
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every tensor of the model with its published name, on the CPU of tensor parallel rank
    0. All ranks of a tensor parallel group must iterate; ranks other than 0 get None."""
    rules = model_rules(model, hf_config)
    for name, parameter in model.named_parameters():
        rule = rules[name]
        for hf_name, part in zip(rule.names, rule.split(parameter), strict=True):
            yield hf_name, _gather(part, rule.dim)


def _gather(part: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    if size == 1 or dim is None:
        return part.to("cpu", copy=True).contiguous() if rank == 0 else None
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(size)] if rank == 0 else None
    dist.gather(
        part,
        parts,
        dst=parallel_state.get_tensor_model_parallel_src_rank(),
        group=parallel_state.get_tensor_model_parallel_group(),
    )
    return None if parts is None else torch.cat([p.cpu() for p in parts], dim=dim)


def random_weights(
    hf_config: Any, shapes: Mapping[str, Sequence[int]], *, seed: int, device: torch.device
) -> ReadSlice:
    """Make a reader of random weights that depend on seed and name only, not on the number of
    ranks: matrices of N(0, initializer_range²), norms and scales 1, biases 0. They are drawn on the
    training device: 2 billion take half a minute on a CPU core."""

    def read(name: str, dim: int | None, rank: int, size: int) -> torch.Tensor:
        tensor = torch.ones(*shapes[name], device=device)
        if tensor.ndim > 1:
            name_seed = zlib.crc32(name.encode()) << 16
            generator = torch.Generator(device).manual_seed(seed + name_seed)
            part = "text" if part_of(name) == "language" else "vision"
            std = getattr(hf_config, f"{part}_config").initializer_range
            tensor.normal_(0, std, generator=generator)
        elif name.endswith("bias"):
            tensor.zero_()
        return tensor if dim is None else tensor.chunk(size, dim)[rank]

    return read


#: Prefixes of names in other checkpoints, in transformers' memory, and of a tower in our model ->
#: prefixes in Qwen2-VL's checkpoints, whose names are used here.
_RENAMED: Final = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "visual.vision_tower.": "vision_tower.",
    "visual.multi_modal_projector.": "multi_modal_projector.",
}
#: The reverse, by family.TensorNames.
WRITTEN: Final[Mapping[TensorNames, Mapping[str, str]]] = {
    "plain": {},
    "nested": {"model.": "model.language_model.", "visual.": "model.visual."},
    "llava": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
}


def published_name(name: str, prefixes: Mapping[str, str] = _RENAMED) -> str:
    """Return the name that a tensor has in Qwen2-VL's checkpoints, or would have:
    model.language_model.norm.weight -> model.norm.weight; or with other prefixes, see `WRITTEN`."""
    for prefix, other in prefixes.items():
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return name


def published_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """List the tensors that a checkpoint of a model of transformers must have, with shapes."""
    state = model.state_dict()
    shapes = {published_name(name): tuple(tensor.shape) for name, tensor in state.items()}
    if model.config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def checkpoint_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> ReadSlice:
    """Make a reader of a checkpoint's tensors, which reads the slices that it is asked for and
    nothing else. Raises ValueError if there are no safetensors, or a tensor that the model needs is
    missing."""
    files: dict[str, tuple[Any, str]] = {}  # published name -> (file, name in it)
    for path in weight_files(folder):
        file = safe_open(path, framework="pt")
        files |= {published_name(name): (file, name) for name in file.keys()}  # noqa: SIM118
    missing = sorted(set(shapes) - set(files))
    if missing:
        raise ValueError(
            f"checkpoint {folder} lacks {len(missing)} of {len(shapes)} tensors, the first is "
            f"{missing[0]!r}; is its download complete?"
        )

    def read(name: str, dim: int | None, rank: int, size: int) -> torch.Tensor:
        file, stored = files[name]
        if dim is None or size == 1:
            return file.get_tensor(stored)
        tensor = file.get_slice(stored)
        length = tensor.get_shape()[dim] // size
        part = slice(rank * length, (rank + 1) * length)
        return tensor[part] if dim == 0 else tensor[:, part]

    return read


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint. Raises ValueError if there are none (other
    formats hold pickles and are not read), or the index names a file that is missing."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(
                f"checkpoint {folder} has no file {name!r}; give a folder with complete "
                "safetensors weights"
            )
    return [folder / name for name in names]


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    hf_config: Any,
    *,
    like: Path | None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a checkpoint folder, which takes its name when it is complete.

    Args:
        folder: replaced if it exists.
        tensors: by published name; a rank that gets None for a tensor writes nothing.
        hf_config: transformers' config of the model.
        like: checkpoint with the model's tokenizer and config; None: the built-in vocabulary.
        max_shard_bytes: limit of a safetensors file.
    """
    weights = {name: tensor for name, tensor in tensors if tensor is not None}
    if not weights:
        return
    with replace_folder(folder) as temporary:
        save_torch_state_dict(
            weights, temporary, max_shard_size=max_shard_bytes, metadata={"format": "pt"}
        )
        dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        write_companions(temporary, hf_config, like)
        if like is None:
            architecture = type(hf_config).__name__.replace("Config", "ForConditionalGeneration")
            values = {**hf_config.to_dict(), "dtype": dtype, "architectures": [architecture]}
            type(hf_config).from_dict(values).save_pretrained(temporary)
            return
        # The checkpoint's own config.json, byte for byte, unless the dtype changed.
        text = (like / "config.json").read_text()
        values = json.loads(text)
        key = "dtype" if "dtype" in values else "torch_dtype"
        if values.get(key) != dtype:
            text = json.dumps({**values, key: dtype}, indent=2) + "\n"
        (temporary / "config.json").write_text(text)
