"""Layouts: for which trainer packs are written. A new one is a file here and a line in LAYOUTS."""

from offline_packing.layouts.base import Layout
from offline_packing.layouts.llava_onevision import LlavaOneVision2Layout, LlavaOneVisionLayout
from offline_packing.layouts.loongforge import LoongForgeLayout

LAYOUTS: dict[str, Layout] = {
    "energon": Layout(),
    "llava_onevision": LlavaOneVisionLayout(),
    "llava_onevision2": LlavaOneVision2Layout(),
    "loongforge": LoongForgeLayout(),
}

__all__ = ["LAYOUTS", "Layout"]
