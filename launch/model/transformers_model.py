"""A model of transformers, of any family, for packed rows.

Weights are kept in float32 and computed with in `model.dtype`, by autocast: bfloat16 weights near
.02 are 1e-4 apart, so that a step of 1e-5 would change nothing. Untrained weights under adapters
are kept in `model.dtype`.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.func import functional_call
from torch.nn import functional as F

from launch.model.config import LoraOptions, TransformersModelConfig, part_of, transformers_class
from launch.model.packed_attention import is_importable, select_backend
from launch.model.packed_model import (
    recompute_layers,
    replace_folder,
    token_losses,
    write_companions,
)
from launch.model.prefix_trees import layout_of
from launch.model.segments import (
    check_attention,
    isolate_segments,
    trees_of_row,
    use_tree_attention,
    use_varlen_attention,
    why_no_flash,
)
from task_encoders.energon_samples import PackedBatch
from task_encoders.families.base.cost import cost_of_sizes
from task_encoders.model_inputs import pixel_kwargs, segment_kwargs


class PackedTransformersModel(nn.Module):
    """A `PackedModel` around one of transformers. Made by `build_transformers_model`.

    Args:
        model: transformers' model, or peft's around one.
        dtype: the dtype in which it computes.
        checkpoint: folder that its weights and its tokenizer came from.
    """

    #: builds transformers' or peft's model again; of a model that `save_hf_checkpoint` writes
    make: Callable[[], Any]

    def __init__(self, model: Any, dtype: torch.dtype, checkpoint: Path | None = None) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype
        config = self.hf_config
        self.cost = cost_of_sizes("", config.text_config.to_dict(), config.vision_config.to_dict())
        self.checkpoint = checkpoint

    @property
    def whole(self) -> Any:
        """transformers' model, with its adapters."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def hf_config(self) -> Any:
        """transformers' config of the whole model."""
        return self.whole.config

    def forward(
        self, row: PackedBatch, segments: PackedSeqParams, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the losses of a row, or its logits; see `PackedModel`. Raises as
        `trees_of_row`."""
        trees = trees_of_row(self.hf_config, segments, row.tokens)
        inputs = segment_kwargs(row.position_ids, layout_of(segments) if trees is None else None)
        if trees is not None:
            inputs["row_trees"] = trees
        with torch.autocast(row.tokens.device.type, self._dtype, self._dtype != torch.float32):
            hidden = self.whole.model(
                input_ids=row.tokens, **inputs, **pixel_kwargs(row)
            ).last_hidden_state
            head = self.whole.lm_head.weight
            if labels is None:
                return self._logits(hidden, head)

            def losses_at(positions: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
                logits = self._logits(hidden[0, positions], head).float()
                return F.cross_entropy(logits, labels[0, positions], reduction="none")

            losses = token_losses(labels[0], head, losses_at)
        if self.training and not losses.requires_grad:
            # No weight that this row uses is trained: keep backward() possible.
            losses.requires_grad_()
        return losses

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Compute the head's logits, within the model's limit if it has one (Gemma's)."""
        logits: torch.Tensor = functional_call(self.whole.lm_head, {"weight": head}, hidden)
        limit = getattr(self.hf_config.get_text_config(), "final_logit_softcapping", None)
        return logits if limit is None else torch.tanh(logits / limit) * limit

    def layers(self) -> list[nn.Module]:
        """List the layers of the decoder and of the vision tower."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [one for one in self.modules() if isinstance(one, GradientCheckpointingLayer)]

    def kernels(self) -> str:
        text, vision = self.hf_config.get_text_config(), self.hf_config.vision_config
        own, of_tower = text._attn_implementation, vision._attn_implementation
        return f"attention {own}; in the vision tower {of_tower}"

    def save_hf_checkpoint(self, folder: Path) -> None:
        """Write a folder that transformers' `from_pretrained` loads, with adapters merged into the
        weights, and the adapters themselves to `lora/` next to it. A collective. Afterwards the
        model must not be used."""
        in_one_piece = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self, options=in_one_piece)  # on rank 0
        if distributed.get_rank() == 0:
            model = self.make()
            named = {name.removeprefix("model."): weight for name, weight in weights.items()}
            model.load_state_dict(named)
            if hasattr(model, "peft_config"):
                with replace_folder(folder.with_name("lora")) as temporary:
                    model.save_pretrained(temporary)
                model = model.merge_and_unload()
            with replace_folder(folder) as temporary:
                model.save_pretrained(temporary)
                write_companions(temporary, self.hf_config, self.checkpoint)
        distributed.barrier()


def build_transformers_model(
    config: TransformersModelConfig,
    *,
    device: torch.device,
    seed: int = 0,
    tokenizer: Path | None = None,
    trees: bool = False,
    **packs: Any,
) -> PackedTransformersModel:
    """Build the whole model, the same on all ranks. Raises ValueError if the checkpoint or the
    sizes cannot be used, or the model cannot be trained on packs (see `isolate_segments`).

    Args:
        config: the model to build.
        device: the device of its weights.
        seed: the seed of random weights, including adapters'.
        tokenizer: folder whose tokenizer the packs were measured with, for a random model.
        trees: rows have prefix trees.
        packs: see `ModelConfig.random_config`.
    """
    dtype, is_random = config.resolve_dtype(device), config.checkpoint is None
    sizes = config.random_config(**packs) if is_random else config.build_transformers_config()
    attention: str = config.attention
    if attention == "auto":  # the fastest kernel that can compute the model's attention
        is_possible = device.type == "cuda" and dtype != torch.float32 and not why_no_flash(sizes)
        flash = "flash_attention_2" if is_importable("flash_attn") else "torch_varlen"
        attention = flash if is_possible else "sdpa"
    check_attention(sizes, attention)
    is_varlen = attention == "torch_varlen"
    if is_varlen:
        select_backend(device, dtype, attention)
    options = {
        "dtype": torch.float32 if config.lora is None or config.fsdp else dtype,
        "attn_implementation": "sdpa" if is_varlen else attention,
    }

    def make() -> Any:
        """Build transformers' model on the CPU, or peft's around it."""
        torch.manual_seed(seed)
        if is_random:
            own = copy.deepcopy(sizes)  # which transformers changes
            model = transformers_class(config.family)._from_config(own, **options)
        else:
            from transformers import AutoModelForImageTextToText

            model = AutoModelForImageTextToText.from_pretrained(config.checkpoint, **options)
        isolate_segments(model)
        if is_varlen:
            use_varlen_attention(model)
        if trees:
            use_tree_attention(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) not in config.freeze)
        if config.recompute == "full":
            recompute_layers(model)
        if config.lora is None:
            return model
        torch.manual_seed(seed)
        return _with_lora(model, config.lora)

    model = PackedTransformersModel(make(), dtype, config.checkpoint or tokenizer)
    model.make = make
    return model if config.fsdp else model.to(device)  # sharding moves it layer by layer


def _with_lora(model: Any, options: LoraOptions) -> Any:
    """Give the language model's matrices adapters, and train nothing else. Returns peft's model."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("model.lora needs peft; pip install -e '.[trainer]'") from error
    matrices = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and part_of(name) == "language" and name != "lm_head"
    }
    known = {name.rpartition(".")[2] for name in matrices}
    if unknown := sorted(set(options.targets) - known):
        raise ValueError(
            f"model.lora.targets {unknown} name no matrix of the language model; choose from: "
            f"{', '.join(sorted(known))}"
        )
    last = options.targets or known
    names = [name for name in matrices if name.rpartition(".")[2] in last]
    # Some are narrow in real models (Qwen3.5's in_proj_b has a row per head): one suffices.
    widest = max(names, key=lambda name: min(matrices[name].weight.shape))
    if options.rank > min(matrices[widest].weight.shape):
        raise ValueError(
            f"model.lora.rank {options.rank} > the smaller side of every matrix (the widest: "
            f"{widest}, {tuple(matrices[widest].weight.shape)}); lower it"
        )
    return get_peft_model(
        model,
        LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=names,
        ),
    )
