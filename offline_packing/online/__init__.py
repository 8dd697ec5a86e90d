"""Packing while training: samples that cannot be packed beforehand, with the same planner."""
