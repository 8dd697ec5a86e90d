"""Packs in NeMo AutoModel, in place of its own packing; docs/recipes.md has a whole recipe.

    dataset: {_target_: launch.trainers.automodel.PacksConfig, path: out/packed}
    packed_sequence: {pack_size: 8192}
    dataloader: {shuffle: false}

- Data: its own collator and loader take packs as `PackedDatasetWrapper` has them; with
  `local_batch_size: k`, k packs are k rows. `validation_dataset` is the same with `split: val`.
- Order: rank r of W trains packs r, r + W, ..., as written.
- Boundaries: `attention_mask` numbers the samples of a row, from which its attention takes them;
  recurrent layers get them in its own models alone.
- Loss: labels are shifted within every sample, whose last token is left out.
- Options: `pack_size` is the packs' seq_length; no length is estimated, no sample replaced.
"""

from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from nemo_automodel.components.datasets.packing import DEFAULT_PACKED_SEQUENCE_CONTRACT
from nemo_automodel.components.datasets.vlm.datasets import PreTokenizedDatasetWrapperConfig
from nemo_automodel.components.datasets.vlm.loader import VlmDataloaderConfig
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import NeatPackConfig

from launch.trainers.shared import PacksAsItems, require_kernels, warn_of_mixed_steps
from task_encoders.families import FAMILIES
from task_encoders.model_inputs import MEDIA_INPUTS, to_transformers_kwargs, token_types

#: Forms of images that its collator passes on (not Mistral 3's, with sizes) and whose masks
#: it makes (not Gemma 4's, in which the tokens of an image see each other).
_LAYOUTS = ("patches", "squares", "tiles")


class AutoModelPacks(PacksAsItems):
    """Packs as AutoModel's `PackedDatasetWrapper` has them: labels shifted within every sample,
    whose last token is left out. Raises ValueError for a family that AutoModel does not pack."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = self.packs.batch([index])
        if batch.image_layout not in _LAYOUTS:
            raise ValueError(
                f"{self.packs.path}: AutoModel does not pack this model's images "
                f"({batch.image_layout!r}); train with launch.train_transformers"
            )
        row = to_transformers_kwargs(batch)
        tokens, real = batch.tokens[0], ~batch.attn_mask[0]
        lengths = batch.cu_lengths[0].diff()
        sample = torch.repeat_interleave(lengths)  # [2, 3] -> 0 0 1 1 1
        # every token with another one after it in its sample
        kept = torch.zeros_like(real)
        kept[:-1] = real[:-1] & real[1:] & (sample[:-1] == sample[1:])
        # segments that are only padding have no number
        _, number, counts = sample[kept].unique_consecutive(return_inverse=True, return_counts=True)
        positions = batch.position_ids[:, 0, kept]
        return {
            "input_ids": tokens[kept],
            "labels": batch.labels[0].roll(-1)[kept],
            "attention_mask": number + 1,
            "position_ids": positions[0] if len(positions) == 1 else positions,
            "mm_token_type_ids": token_types(tokens[kept], self.token_ids),
            "seq_lens": counts.tolist(),
            "seq_lens_padded": counts.tolist(),
            "n_images": len(batch.image_grid_thw),
            "n_videos": len(batch.video_grid_thw),
            **{name: row.get(name) for name in MEDIA_INPUTS},
        }


@dataclass
class PacksConfig:
    """A recipe's `dataset` section. `path`: a folder of packs, or a metadataset YAML; `processor`:
    its folder, if not the model's."""

    path: str
    split: str = "train"
    processor: str | None = None

    def build(self) -> AutoModelPacks:
        """Open the packs. Raises as `open_as_measured`."""
        return AutoModelPacks(self.path, "AutoModel", split=self.split, processor=self.processor)


class _PackedAlready(NeatPackConfig):
    def build(self, *, ds_raw: Any = None, **_: Any) -> Any:
        return ds_raw


_automodels_own = VlmDataloaderConfig.build


def _build(config: VlmDataloaderConfig, **options: Any) -> Any:
    """Build AutoModel's loader over packs; other data are left to AutoModel. Raises ValueError if
    the recipe has options that packs do not support, or the recurrent layers of its model would get
    no boundaries: AutoModel gives boundaries to its own model alone, which drops them without both
    packages of kernels."""
    given, packing = config.dataset_config, config.packing
    if not isinstance(given, PacksConfig):
        return _automodels_own(config, **options)
    processor = given.processor or options["pretrained_model_name_or_path"]
    packs = replace(given, processor=processor).build()
    seq_length, is_recurrent = packs.seq_length, FAMILIES[packs.family].is_recurrent
    contract = options.get("packing_contract", DEFAULT_PACKED_SEQUENCE_CONTRACT)
    if packing is None and contract is not DEFAULT_PACKED_SEQUENCE_CONTRACT:
        # Validation: AutoModel reads packed_sequence for training only, which has set the contract.
        packing, config = NeatPackConfig(seq_length), replace(config, shuffle=False)
    if packing is None or (packing.pack_size, packing.max_packs) != (seq_length, None):
        wrong = f"set packed_sequence: {{pack_size: {seq_length}}}, and no max_packs"
    elif config.shuffle:
        wrong = "in the order to be trained in; set dataloader: {shuffle: false}"
    elif packing.packing_format == "thd" and options.get("cp_size", 1) > 1:
        wrong = "packing_format thd with cp_size > 1 pads every sample; set packing_format: neat"
    elif is_recurrent and not contract.requires_packed_sequence_metadata:
        wrong = "only AutoModel's own model keeps its samples apart; leave out force_hf"
    else:
        require_kernels(packs.family, "AutoModel", "fla.ops.gated_delta_rule", "causal_conv1d")
        warn_of_mixed_steps(packs.packs, options["dp_world_size"])
        config = replace(
            config,
            dataset_config=SimpleNamespace(build=lambda: packs),
            packing=_PackedAlready(**asdict(packing)),
            pretokenization=PreTokenizedDatasetWrapperConfig(),  # not used, but asked for
        )
        return _automodels_own(config, **options)
    raise ValueError(f"{given.path} is packed already: {wrong}")


VlmDataloaderConfig.build = _build
