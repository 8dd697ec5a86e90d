"""Layouts: how packs lie on disk. A new one is a file here and a line in LAYOUTS."""

from offline_packing.layouts.base import Layout
from offline_packing.layouts.energon import EnergonLayout
from offline_packing.layouts.indexed import IndexedLayout
from offline_packing.layouts.llava_onevision import LlavaOneVision2Layout, LlavaOneVisionLayout
from offline_packing.layouts.loongforge import LoongForgeLayout
from offline_packing.layouts.references import ReferencesLayout

LAYOUTS: dict[str, Layout] = {
    "energon": EnergonLayout(),
    "indexed": IndexedLayout(),
    "llava_onevision": LlavaOneVisionLayout(),
    "llava_onevision2": LlavaOneVision2Layout(),
    "loongforge": LoongForgeLayout(),
    "references": ReferencesLayout(),
}

__all__ = ["LAYOUTS", "Layout"]
