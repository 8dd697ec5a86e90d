"""The demo: a small generated dataset whose true contents are known."""

from offline_packing.demo.generate import generate_demo_dataset

__all__ = ["generate_demo_dataset"]
