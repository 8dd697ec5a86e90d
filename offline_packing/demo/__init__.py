"""The embedded default: a small generated dataset whose truth is known."""

from offline_packing.demo.generate import generate_demo_dataset

__all__ = ["generate_demo_dataset"]
