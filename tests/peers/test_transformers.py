"""transformers' Trainer on packs. It builds no batches of its own: that the rows equal what its
processors make of the samples is tested in tests/task_encoders/families."""

from functools import partial

import transformers

from tests.helpers.hf_trainers import numbers_read, packed_trainer, recorded_run
from tests.helpers.tiny_families import FURTHER
from tests.peers.laws import TrainingLaws

VERSION = f"transformers {transformers.__version__}"
FAMILY = "qwen2_vl"


class TestTraining(TrainingLaws):
    run = partial(recorded_run, packed_trainer)
    read = partial(numbers_read, packed_trainer)
    families = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", *FURTHER)
