"""The embedded default: a small generated dataset whose truth is known."""

from offline_packing.demo.contact_sheet import contact_sheet
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.demo.truth import DemoTruth, ImageTruth, PlantedFault

__all__ = ["DemoTruth", "ImageTruth", "PlantedFault", "contact_sheet", "generate_demo_dataset"]
