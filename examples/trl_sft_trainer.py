"""Train a checkpoint on packs in TRL's SFTTrainer. Other options are SFTConfig's.

torchrun --nproc-per-node 8 examples/trl_sft_trainer.py out/packed MODEL out/trained
"""

import sys

import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer, HfArgumentParser
from trl import SFTConfig

from launch.trainers.shared import open_as_measured
from launch.trainers.trl_trainer import PackedSFTTrainer

packed, checkpoint, output, *options = sys.argv[1:]
(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(
    ["--output_dir", output, *options]
)
packs, _ = open_as_measured(
    packed, "PackedSFTTrainer", processor=checkpoint, pixel_transport="uint8", trees=True
)
# Weights stay in float32, which steps of 1e-5 change; TRL computes in bfloat16 by default.
attention = "flash_attention_2" if torch.cuda.is_available() else "sdpa"
model = AutoModelForImageTextToText.from_pretrained(
    checkpoint, dtype=torch.float32, attn_implementation=attention
)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
trainer = PackedSFTTrainer(args=args, model=model, train_dataset=packs, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
