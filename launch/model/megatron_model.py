"""Models for packed rows: megatron-core's GPTModel and transformers' vision tower.

patches ─▶ vision tower ─▶ features ┐ (replicated on tensor parallel ranks, see vision_tower)
tokens  ─▶ embedding ───────────────┴▶ decoder, attention inside segments ─▶ loss of labels

In Qwen3-VL, features from inner layers of the tower are added to the outputs of the decoder's first
layers (DeepStack).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from launch.model.config import ModelConfig, part_of, transformers_classes
from launch.model.context_parallel import RowPart, cut_row
from launch.model.hf_checkpoint import CheckpointReader, write_checkpoint
from launch.model.hf_weights import (
    RandomWeights,
    gather_weights,
    load_weights,
    model_rules,
    published_shapes,
    written_name,
)
from launch.model.language_model import (
    build_language_model,
    head_dim_of,
    rope_base,
    rope_frequencies,
    token_losses,
)
from launch.model.packed_attention import select_backend
from launch.model.vision_tower import (
    Medium,
    build_visual,
    media_features,
    picture_features,
)
from task_encoders.families import FAMILIES
from task_encoders.families.base.cost import cost_of_sizes


class PackedMegatronModel(torch.nn.Module):
    """A model that reads packed rows. Made by `build_model`."""

    def __init__(
        self, family: str, hf_config: Any, language_model: GPTModel, visual: torch.nn.Module
    ) -> None:
        super().__init__()
        self._family = FAMILIES[family]
        self.hf_config = hf_config
        #: folder that the weights, and the tokenizer that belongs to them, came from
        self.checkpoint: Path | None = None
        self.language_model = language_model
        self.visual = visual
        text_config = hf_config.text_config
        sizes = text_config.to_dict(), hf_config.vision_config.to_dict()
        self.cost = cost_of_sizes("", *sizes)
        #: (S, 1, H) of the current row, for each of the first layers not yet run
        self._deep_features: list[torch.Tensor] = []
        deep = getattr(hf_config.vision_config, "deepstack_visual_indexes", None) or ()
        if len(deep) > len(language_model.decoder.layers):
            raise ValueError(
                f"deepstack_visual_indexes {list(deep)} feed {len(deep)} layers, the language "
                f"model has {len(language_model.decoder.layers)}"
            )
        for layer in language_model.decoder.layers[: len(deep)]:
            layer.register_forward_hook(self._add_deep_features)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        packed_seq_params: PackedSeqParams,
        imgs: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One packed row of S tokens.

        Args:
            tokens: (1, S) int64.
            position_ids: (3, 1, S) int64, (1, 1, S) for families whose positions count tokens.
            packed_seq_params: the segments; ranks of its `cp_group` compute a part of the row each.
            imgs, image_grid_thw: (patches, C·T·p·p), and (N, 3) in patches; may be empty.
            labels: (1, S) int64, shifted: the token that follows, or IGNORE_INDEX.
            pixel_values_videos, video_grid_thw: the same for videos.

        Returns:
            With labels the loss of every token, (1, S) float32, 0 where ignored or another rank's;
            without, the logits (1, S / CP, vocab_size / TP) of this rank's tokens and words.
        """
        part = cut_row(packed_seq_params)
        own = part.own if part else slice(None)
        media = (imgs, image_grid_thw), (pixel_values_videos, video_grid_thw)
        embeddings, self._deep_features = self._embed(tokens, part, *media)
        hidden = self.language_model.decoder(
            hidden_states=embeddings,
            attention_mask=None,
            rotary_pos_emb=self._angles(position_ids[..., own], packed_seq_params),
            # Not "thd": megatron-core would look up angles segment by segment, each time waiting.
            packed_seq_params=dataclasses.replace(part or packed_seq_params, qkv_format="sbhd"),
        )
        if labels is None:
            return self._logits(hidden).transpose(0, 1)
        losses = self._token_losses(hidden, labels[0, own])
        return losses if part is None else part.in_row(losses)

    def save_hf_checkpoint(self, folder: Path) -> None:
        """Write a folder that transformers' `from_pretrained` loads. Every rank must call this.

        Tensors are gathered over the first tensor parallel group and written by rank 0.
        """
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
            names = self._family.tensor_names
            gathered = gather_weights(self, self.hf_config)
            tensors = ((written_name(name, names), tensor) for name, tensor in gathered)
            write_checkpoint(folder, tensors, self.hf_config, like=self.checkpoint)
        torch.distributed.barrier()

    def _angles(self, position_ids: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        """Rotation angles of this rank's tokens, (S, 1, 1, head_dim)."""
        text_config = self.hf_config.text_config
        rope, head_dim = text_config.rope_parameters, head_dim_of(text_config)
        longest = text_config.max_position_embeddings
        return rope_frequencies(
            position_ids,
            head_dim=head_dim,
            base=rope_base(rope, params, max_positions=longest, head_dim=head_dim),
            sections=rope.get("mrope_section", ()),
            interleaved=rope.get("mrope_interleaved", False),
        )

    def _add_deep_features(
        self, _module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """A hook after each of the first layers."""
        if not self._deep_features:
            return outputs
        hidden, context = outputs
        return hidden + self._deep_features.pop(0), context

    def _embed(
        self,
        tokens: torch.Tensor,
        part: RowPart | None,
        *media: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(S, 1, H) of this rank's tokens: word embeddings, with features in the places of image
        and video tokens; and what is added in these places after the first layers. `media`: patches
        and grids of images, and of videos."""
        own = tokens if part is None else tokens[:, part.own]
        embeddings = self.language_model.embedding(input_ids=own, position_ids=None)
        config = self.hf_config
        video_token_id = getattr(config, "video_token_id", -1)  # of none where frames are images
        kinds = (("image", config.image_token_id), ("video", video_token_id))
        present = [
            Medium(*kind, patches.to(embeddings.dtype), grids.long())
            for kind, (patches, grids) in zip(kinds, media, strict=True)
            if patches is not None and grids is not None and len(grids)
        ]
        deep: list[torch.Tensor] = []
        if present:
            layout = self._family.build.IMAGE_LAYOUT
            if layout == "patches":
                last, *others = media_features(self.visual, tokens, present, part, self.cost)
            else:
                last, others = picture_features(self.visual, tokens, present[0], layout), []
            ids = [medium.token_id for medium in present]
            embeddings = _put_features(embeddings, own, ids, last)
            deep = [_put_features(torch.zeros_like(embeddings), own, ids, one) for one in others]
        if self.training and not embeddings.requires_grad:
            # Only the projector is trained, and this row has no image: keep backward() possible.
            embeddings.requires_grad_()
        return embeddings, deep

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, 1, H) -> (n, 1, vocab_size / TP)."""
        tied = self.language_model.share_embeddings_and_output_weights
        weight = self.language_model.shared_embedding_or_output_weight() if tied else None
        return self.language_model.output_layer(hidden, weight=weight)[0]

    def _token_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(S, 1, H) and (S,) -> (1, S)."""

        def losses_at(positions: torch.Tensor) -> torch.Tensor:
            logits = self._logits(hidden[positions]).squeeze(1)
            return vocab_parallel_cross_entropy(logits, labels[positions])

        return token_losses(labels, losses_at)


def _put_features(
    embeddings: torch.Tensor, tokens: torch.Tensor, token_ids: Sequence[int], features: torch.Tensor
) -> torch.Tensor:
    """Put features in the places of their tokens: those of the first id, then of the next."""
    masks = [tokens[0] == token_id for token_id in token_ids]
    parts = features.split([int(mask.sum()) for mask in masks])
    for mask, part in zip(masks, parts, strict=True):
        embeddings = embeddings.masked_scatter(mask[:, None, None], part)
    return embeddings


def build_model(
    config: ModelConfig, *, device: torch.device, seed: int = 0, shares_rows: bool = False
) -> PackedMegatronModel:
    """The model on this rank: its share of the language model, and the whole vision tower.

    Needs `launch.loop.parallel.initialize_parallel`. Weights are the same on all data parallel
    ranks and do not depend on tensor parallelism.

    Args:
        seed: of random weights.
        shares_rows: rows go over several ranks.

    Raises:
        ValueError: the checkpoint or the sizes cannot be used.
    """
    _check_rows(config.family, shares_rows)
    hf_config = config.build_transformers_config()
    outline = transformers_classes(config.family).without_memory(hf_config)
    shapes, dtype = published_shapes(outline), config.resolve_dtype(device)
    backend = select_backend(device, dtype, config.attention, context_parallel=shares_rows)
    language_model = build_language_model(
        hf_config,
        shapes,
        dtype=dtype,
        device=device,
        backend=backend,
        recompute=config.recompute == "full",
    )
    visual = build_visual(outline.model, config, hf_config, dtype, device)
    model = PackedMegatronModel(config.family, hf_config, language_model, visual).to(device)
    _check_complete(model, shapes)
    if config.checkpoint is None:
        load_weights(model, hf_config, RandomWeights(hf_config, shapes, seed=seed, device=device))
    else:
        with CheckpointReader(config.checkpoint, shapes) as reader:
            load_weights(model, hf_config, reader)
    model.checkpoint = config.checkpoint
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in config.freeze)
    return model


def _check_rows(family: str, shares_rows: bool) -> None:
    if shares_rows and FAMILIES[family].build.IMAGE_LAYOUT != "patches":
        raise ValueError(
            f"rows of {family} cannot go over several ranks; set parallel.context=1, and pack "
            "for one rank each"
        )


def _check_complete(model: PackedMegatronModel, tensors: Iterable[str]) -> None:
    """Raise ValueError for a model with tensors that have no place here."""
    rules = model_rules(model, model.hf_config)
    used = {part for name, _ in model.named_parameters() for part in rules[name].names}
    if unused := sorted(set(tensors) - used):
        raise ValueError(
            f"a {model.hf_config.text_config.model_type} model is not built of megatron-core's "
            f"layers here: it has {unused[0]}; use python -m launch.train_transformers"
        )
