"""What every rank would load by itself. Imported last by the server that forks ranks, it is there
in each of them: the built-in tokenizer and template, and objects that no collection visits."""

import gc
import os

from task_encoders.families import build_sample_encoder
from tests.helpers import quick_imports

build_sample_encoder("qwen2_vl")
quick_imports.end()
gc.collect()
gc.freeze()
# As tests/conftest.py sets them for the tests' own processes.
gc.unfreeze = lambda: None
os.fsync = lambda descriptor: None
