"""Loss and gradients of rows, to be compared however their samples are packed."""

from typing import Any

import torch

from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packs.tokenized import IGNORE_INDEX


class Gradients:
    """Loss, and its gradients, summed over the labelled tokens of all rows."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.loss = 0.0
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, batch: PackedBatch) -> torch.Tensor:
        """Add a row, and return its logits."""
        self.model.zero_grad()
        output = self.model(**to_transformers_kwargs(batch))
        loss = output.loss * int((batch.labels != IGNORE_INDEX).sum())
        loss.backward()
        self.loss += float(loss.detach())
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.sums[name] = self.sums.get(name, 0) + parameter.grad.clone()
        return output.logits[0].detach()
