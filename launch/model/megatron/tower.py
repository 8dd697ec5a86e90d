"""The vision tower on packed rows: transformers' own, whole on every rank.

Qwen's towers take a row's patches. Others take whole pictures, and a projector follows.

Under context parallelism, which only Qwen's towers support, each rank of a group runs the tower on
its share of the row's frames (an image is one), contiguous and with nearly equal work, and sends
the features to the ranks that hold their tokens. No frame attends to another, so a video may be cut
between two frames.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import distributed

from launch.model.config import ModelConfig
from launch.model.megatron.context_parallel import RowPart, hand_over
from launch.model.packed_attention import register_attention
from launch.model.packed_model import recompute_layers
from task_encoders.families.base.cost import ModelCost
from task_encoders.model_inputs import IMAGE_LAYOUTS


class Medium(NamedTuple):
    """One kind of media in a row."""

    #: "image" or "video"
    kind: str
    token_id: int
    #: (patches, C·T·p·p)
    patches: torch.Tensor
    #: (N, 3) int64, in patches
    grids: torch.Tensor


def build_visual(
    outline: Any, config: ModelConfig, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    """Build the part of a model of transformers that sees: a tower that takes the patches of a
    packed row; or the model without its language model, if its tower takes whole pictures.
    `outline`: the model, without memory; may be changed."""
    takes_patches = hasattr(outline, "visual")
    kind = type(outline.visual if takes_patches else outline.vision_tower)
    with torch.device(device):
        tower = kind._from_config(
            copy.deepcopy(hf_config.vision_config), dtype=dtype, attn_implementation="sdpa"
        )
        if not takes_patches:
            projector = type(outline.multi_modal_projector)(hf_config)
    if config.recompute == "full":
        recompute_layers(tower)
    if takes_patches:
        # Set afterwards: at construction transformers would look for "flash" kernels on the hub.
        tower.config._attn_implementation = register_attention()
        return tower
    del outline.language_model
    outline.vision_tower, outline.multi_modal_projector = tower, projector.to(dtype)
    return outline


def media_features(
    visual: Any,
    layout: str,
    tokens: torch.Tensor,
    media: Sequence[Medium],
    part: RowPart | None,
    cost: ModelCost,
) -> list[torch.Tensor]:
    """Compute features of the media tokens that this rank holds: of one kind, then of the other,
    each in the order of its tokens; the last layer's, then those of layers that feed DeepStack.
    Raises ValueError, see `_check_count`.

    Args:
        visual: of `build_visual`.
        layout: the form of its images, a name in model_inputs.IMAGE_LAYOUTS.
        tokens: (1, S), the whole row's.
        media: the kinds present, each with the patches of the whole row; images only, if they are
            whole pictures.
        part: this rank's part of the row; then a collective. None: the rank holds the whole row.
    """
    if layout != "patches":
        (images,) = media
        pictures = IMAGE_LAYOUTS[layout](images.patches, images.grids)
        found = torch.cat(list(visual.get_image_features(**pictures).pooler_output))
        _check_count(tokens, images, len(found))
        return [found]
    merged = visual.config.spatial_merge_size**2  # patches to a token
    for medium in media:
        _check_count(tokens, medium, len(medium.patches) // merged)
    patches = torch.cat([medium.patches for medium in media])
    grids = torch.cat([medium.grids for medium in media])
    if part is None:
        return _run(visual, patches, grids)
    size, rank = distributed.get_world_size(part.cp_group), distributed.get_rank(part.cp_group)
    t, h, w = grids.cpu().numpy().T
    frames = np.repeat(np.stack([h * w, h, w], axis=1), t, axis=0)  # (F, 3): patches, height, width
    bounds = share_frames(cost.tower_flops(frames[:, 0]), size)
    starts = np.concatenate([[0], frames[:, 0].cumsum()])[bounds].tolist()
    own = frames[bounds[rank] : bounds[rank + 1], 1:]
    own_grids = torch.from_numpy(np.pad(own, ((0, 0), (1, 0)), constant_values=1))
    own_patches = patches[starts[rank] : starts[rank + 1]]
    features = _run(visual, own_patches, own_grids.to(grids.device))
    receivers = torch.cat([part.owner[tokens[0] == medium.token_id] for medium in media])
    together = torch.cat(features, dim=1)
    handed = hand_over(together, [start // merged for start in starts], receivers, part)
    return list(handed.split([one.shape[1] for one in features], dim=1))


def _check_count(tokens: torch.Tensor, medium: Medium, expected: int) -> None:
    """Raise ValueError if a row has other tokens of a medium than features."""
    found = int((tokens == medium.token_id).sum())
    if found != expected:
        raise ValueError(
            f"{found} {medium.kind} tokens in the row, {expected} {medium.kind} features; "
            "tokens and media were encoded with different settings"
        )


def _run(tower: Any, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
    if not len(patches):
        # This rank has no frame. Its features are empty, but take part in the backward pass.
        config = tower.config
        width = getattr(config, "out_hidden_size", None) or config.hidden_size
        count = 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters())
        return [patches.new_zeros(0, width, requires_grad=trained) for _ in range(count)]
    found = tower(patches, grid_thw=grids)
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]


def share_frames(flops: npt.NDArray[np.float64], size: int) -> list[int]:
    """Cut frames into `size` contiguous shares, so that the largest has as few operations as
    possible (to 1e-9 of all). Returns the (size + 1,) bounds."""
    done = np.concatenate([[0.0], flops.cumsum()])

    def fill(limit: float) -> list[int]:
        """Return bounds of shares that each take all frames that `limit` allows."""
        bounds = [0]
        for _ in range(size):
            bounds.append(int(np.searchsorted(done, done[bounds[-1]] + limit, "right")) - 1)
        return bounds

    low, high = done[-1] / size, done[-1]
    for _ in range(30):
        limit = (low + high) / 2
        if fill(limit)[-1] == len(flops):
            high = limit
        else:
            low = limit
    return fill(high)
