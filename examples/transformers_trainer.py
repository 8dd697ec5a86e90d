"""Train a checkpoint on packs in transformers' Trainer. Other options are TrainingArguments'.

torchrun --nproc-per-node 8 examples/transformers_trainer.py out/packed MODEL out/trained --bf16
"""

import sys

import torch
from transformers import AutoModelForImageTextToText, HfArgumentParser, TrainingArguments

from launch.trainers.shared import open_as_measured
from launch.trainers.transformers_trainer import PackedTrainer

packed, checkpoint, output, *options = sys.argv[1:]
parser = HfArgumentParser(TrainingArguments)
(args,) = parser.parse_args_into_dataclasses(["--output_dir", output, *options])
packs, _ = open_as_measured(
    packed, "PackedTrainer", processor=checkpoint, pixel_transport="uint8", trees=True
)
# Weights stay in float32, which steps of 1e-5 change; --bf16 computes in bfloat16.
attention = "flash_attention_2" if torch.cuda.is_available() else "sdpa"
model = AutoModelForImageTextToText.from_pretrained(
    checkpoint, dtype=torch.float32, attn_implementation=attention
)
trainer = PackedTrainer(args=args, model=model, train_dataset=packs)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
