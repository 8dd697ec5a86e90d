"""Lets torchvision be imported beside PyTorch's CPU wheel, which it has no build for: its compiled
operators are declared, and fail if they are called. Resizing needs none of them."""

import torch

if torch.version.cuda is None:  # beside the CUDA wheel it declares them itself
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        _LIBRARY.define(_schema)
