"""Train a vision-language model on packs with Megatron-LM's own `pretrain()`.

The language model is megatron-core's `GPTModel` with attention inside the samples of a pack, the
vision tower transformers'. Both take their weights, and Megatron-LM's arguments their defaults,
from a Hugging Face checkpoint:

    export PYTHONPATH=Megatron-LM CUDA_DEVICE_MAX_CONNECTIONS=1
    export OFFLINE_PACKED_DATA=1 OFFLINE_PACKING_BMR=1
    torchrun --nproc-per-node 8 examples/megatron_lm/pretrain_packed_vlm.py \\
        --hf-checkpoint Qwen2.5-VL-7B-Instruct --data-path out/packed \\
        --tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 \\
        --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 \\
        --lr 1e-5 --min-lr 1e-6 --lr-warmup-iters 30 --lr-decay-style cosine --weight-decay 0 \\
        --recompute-granularity full --eval-interval 1000 --eval-iters 0 --log-interval 1 \\
        --save out/trained --save-interval 100 --save-hf out/hf

Add `--load out/trained` to go on where it stopped, data too. Batch sizes count packs; a loss is the
mean over the labels of a step (`--calculate-per-token-loss`, which is set).
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.transformer.module import mark_keep_in_fp32
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import get_checkpoint_name

from launch.config import DataConfig
from launch.data.micro_batches import build_task_encoder
from launch.data.packed_data import check_room, read_packed_data
from launch.loop.setup import check_token_ids
from launch.model.config import ModelConfig
from launch.model.megatron.model import (
    PackedMegatronModel,
    build_model,
    model_outline,
    transformer_config,
)
from launch.model.megatron.weights import published_shapes
from launch.trainers.megatron_lm import DataIterator, build_dataloaders, forward_step
from task_encoders.model_inputs import required_pad_multiple

#: Arguments that are not for packs here: the values that are, and why.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_model_parallel_size": ((1,), "the vision tower has no place in its stages"),
    "mtp_num_layers": ((None, 0), "it would predict tokens of the next sample"),
    "sequence_parallel": ((False,), "features of images are put into whole rows"),
    "num_experts": ((None,), "layers are dense"),
    "fp16": ((False,), "train in bf16 or float32"),
    "fp8": ((None,), "layers are not TransformerEngine's"),
    "fp4": ((None,), "layers are not TransformerEngine's"),
    "recompute_granularity": ((None, "full"), "full computes each layer again"),
    "recompute_method": ((None, "uniform"), "each layer is computed again"),
    "recompute_num_layers": ((None, 1), "each layer is computed again"),
    "use_torch_fsdp2": ((False,), "shard with --use-distributed-optimizer"),
    "use_megatron_fsdp": ((False,), "shard with --use-distributed-optimizer"),
    "init_model_with_meta_device": ((False,), "weights are read while the model is built"),
    "cuda_graph_impl": (("none",), "rows differ in their shapes"),
    "overlap_grad_reduce": (
        (False,),
        "it waits for the tower's gradients, which rows of text lack",
    ),
}
#: Fields of the layers' config that the checkpoint decides.
ARCHITECTURE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "layernorm_epsilon normalization add_bias_linear add_qkv_bias qk_layernorm hidden_dropout "
    "attention_dropout multi_latent_attention window_size"
).split()


def model_config(args: Namespace) -> ModelConfig:
    """The model that the arguments name, in the family of the packs."""
    return ModelConfig(
        family=read_packed_data(args.data_path[0]).model.family,
        checkpoint=args.hf_checkpoint,
        dtype="bfloat16" if args.bf16 else "float32",
        recompute=args.recompute_granularity or "none",
        freeze=frozenset(args.freeze),
    )


def add_packed_vlm_args(parser: ArgumentParser) -> ArgumentParser:
    """Add this script's arguments; values of the checkpoint and the packs become defaults."""
    group = parser.add_argument_group("packed vision-language model")
    group.add_argument("--hf-checkpoint", type=Path, required=True, metavar="FOLDER")
    parts = "parts that are not trained: vision, projector, language"
    group.add_argument("--freeze", nargs="+", default=[], metavar="PART", help=parts)
    group.add_argument("--save-hf", type=Path, metavar="FOLDER", help="the trained model")
    args, _ = parser.parse_known_args()
    for name, (allowed, reason) in REFUSED.items():
        if (value := getattr(args, name)) not in allowed:
            parser.error(f"{name} {value} is not for packs here: {reason}")
    if len(args.data_path or ()) != 1:
        parser.error("--data-path takes one packed folder, or one metadataset YAML")
    outline = model_outline(model_config(args))
    text, tensors = outline.config.text_config, published_shapes(outline)
    of_checkpoint = transformer_config(
        text, tensors, 1, dtype=torch.float32, device=torch.device("cpu")
    )
    parser.set_defaults(
        **{name: getattr(of_checkpoint, name) for name in ARCHITECTURE},
        swiglu=True,
        group_query_attention=True,
        position_embedding_type="none",  # the model computes M-RoPE's angles itself
        max_position_embeddings=text.max_position_embeddings,
        untie_embeddings_and_output_weights=not outline.config.tie_word_embeddings,
        tokenizer_type="NullTokenizer",  # packs hold tokens
        vocab_size=text.vocab_size,
        make_vocab_size_divisible_by=1,
        seq_length=read_packed_data(args.data_path[0]).seq_length,
        recompute_method="uniform",  # of each layer, where --recompute-granularity asks for it
        recompute_num_layers=1,
        dataloader_type="external",
        calculate_per_token_loss=True,
    )
    return parser


def layers_config(of_checkpoint: TransformerConfig) -> TransformerConfig:
    """The layers' config by Megatron-LM's arguments. Raises ValueError where they contradict the
    checkpoint."""
    config = core_transformer_config_from_args(get_args())
    for name in ARCHITECTURE:
        given, wanted = getattr(config, name), getattr(of_checkpoint, name)
        if given != wanted:
            raise ValueError(f"{name} {given}: the checkpoint has {wanted}; leave it out")
    config.context_parallel_size = 1  # a row brings its group, and layers gather its keys
    config.recompute_granularity = None  # the model's layers compute themselves again
    for name in ("apply_rope_fusion", "persist_layer_norm", "perform_initialization"):
        setattr(config, name, False)
    config.use_cpu_initialization = of_checkpoint.use_cpu_initialization
    return config


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: Any = None,
) -> PackedMegatronModel:
    """This rank's share of the model, with the checkpoint's weights."""
    args = get_args()
    model = build_model(
        model_config(args),
        device=torch.device(torch.cuda.current_device()),
        shares_rows=args.context_parallel_size > 1,
        layers_config=layers_config,
    )
    for name in ("pg_collection", "set_input_tensor"):  # which Megatron-LM's loop looks for
        setattr(model, name, getattr(model.language_model, name))
    # The head is used once per chunk of labels, and those uses' gradients add up before.
    model.language_model.output_layer.gradient_accumulation_fusion = False
    for buffer in model.buffers():  # of the tower's rotary frequencies
        mark_keep_in_fp32(buffer)
    return model


def train_valid_test_dataloaders_provider(
    train_val_test_num_samples: Any,
) -> tuple[DataIterator | None, list[DataIterator] | None, None]:
    """Packs in their order, from where a loaded checkpoint was saved."""
    args = get_args()
    path, context = args.data_path[0], args.context_parallel_size
    check_room(path, context)
    task_encoder = build_task_encoder(
        DataConfig(path=path),
        read_packed_data(path),
        pad_multiple=required_pad_multiple(context_parallel=context),
    )
    check_token_ids(model_config(args), task_encoder.encoder.media_token_ids)
    saved = None
    if args.iteration:
        rank = parallel_state.get_data_parallel_rank()
        saved = get_checkpoint_name(
            f"{args.load}/dataloader",
            args.iteration,
            pipeline_rank=0,
            tensor_rank=0,
            basename=f"train_dataloader_dprank{rank:03d}.pt",
        )
    return build_dataloaders(args, task_encoder, saved)


def main() -> None:
    """Train as the command says."""
    models: list[PackedMegatronModel] = []

    def keep_model(**given: Any) -> PackedMegatronModel:
        models.append(model_provider(**given))
        return models[0]

    args = parse_and_validate_args(extra_args_provider=add_packed_vlm_args)
    if args.save:
        args.dataloader_save = f"{args.save}/dataloader"
    train_valid_test_dataloaders_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_dataloaders_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        keep_model,
    )
    if args.save_hf:
        models[0].save_hf_checkpoint(args.save_hf)


if __name__ == "__main__":
    main()
