"""AdamW on float32 shards of a model's weights, by torch's `fully_shard` (FSDP2).

Layers are sharded one by one, and the rest of the model together: each rank owns some rows of every
weight, of its gradient and of AdamW's two moments. The weights themselves either stay gathered from
one step to the next (ZeRO stage 2, https://arxiv.org/abs/1910.02054), or only while a layer
computes (stage 3):

    weights  [ rank 0's rows | rank 1's | … ]   model dtype, gathered
    shards   [ rank 0's rows ]                  float32, as are the gradient sum and the moments

Per N parameters in bfloat16 on D ranks: 2N bytes of gathered weights, and 16N/D. In the backward
pass each layer's gradients are summed over the ranks, in float32, while the next layer computes:
all gradients of a micro batch, let alone their sums, are never on one rank.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from megatron.core import parallel_state
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from launch.config import OptimizerConfig

#: AdamW's names of its moments.
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW on this rank's shards, with clipping over all ranks. Weight decay applies to matrices
    only, as usual: not to biases and norms.

    Gradients of micro batches are summed by the backward passes. All ranks must make equally many,
    through the same layers, and with gradients for the same other weights.

    The ranks that see different rows, or parts of a row, share the shards. Needs
    `launch.loop.parallel.initialize_parallel`.

    Args:
        model: is sharded in place. Weights that tensor parallel ranks divide are marked
            `tensor_model_parallel`.
        layers: the model's layers.
        dtype: the dtype of gathered weights; None: float32.
        device: the device of the shards.
        stays_gathered: weights stay gathered, and frozen ones are not sharded.

    Raises:
        ValueError: there are no weights to train.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        layers: Iterable[nn.Module],
        dtype: torch.dtype | None,
        *,
        device: torch.device,
        stays_gathered: bool = True,
    ) -> None:
        # Sharding makes new parameters, and the memory of the old ones must be freed.
        hooks = {n: p._backward_hooks for n, p in model.named_parameters() if p.requires_grad}
        if not hooks:
            raise ValueError("every part of the model is frozen; leave one of them to train")
        self._divided = {
            name
            for name, parameter in model.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._stays_gathered = stays_gathered
        mesh = DeviceMesh.from_group(self._group, device.type)
        # Layers that stay gathered keep the dtype of what goes in, such as angles in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=not stays_gathered
        )
        whole = {one for one in model.parameters() if stays_gathered and not one.requires_grad}
        self._units: list[Any] = [*layers, model]
        for unit in self._units:
            for parameter in unit.parameters():
                if parameter not in whole:
                    parameter.data = parameter.data.float()
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=not stays_gathered,
                ignored_params=whole,
            )
            unit.set_reshard_after_backward(not stays_gathered, recurse=False)
            unit.set_force_sum_reduction_for_comms(True)  # gloo scales none
            unit.set_gradient_divide_factor(1.0)
        #: replaced in the model while they are gathered
        self._parameters: dict[str, Any] = {n: p for n, p in model.named_parameters() if n in hooks}
        self.publish()
        for name, parameter in model.named_parameters():
            for hook in (hooks.get(name) or {}).values():
                parameter.register_hook(hook)
        #: the rows of each weight that this rank owns
        self.shards = {n: nn.Parameter(p.to_local().detach()) for n, p in self._parameters.items()}
        groups = [
            {"params": [shard], "weight_decay": config.weight_decay if shard.ndim > 1 else 0.0}
            for shard in self.shards.values()
        ]
        betas, fused = (config.beta1, config.beta2), device.type == "cuda"
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=fused)
        #: weights and moments by kind and weight, to be saved or overwritten
        self.state = {"weights": {n: p.detach() for n, p in self._parameters.items()}}
        for kind in _MOMENTS:
            self.state[kind] = {n: torch.zeros_like(p) for n, p in self.state["weights"].items()}
        for name, shard in self.shards.items():
            moments = {kind: self.state[kind][name].to_local() for kind in _MOMENTS}
            self._adamw.state[shard] = {"step": torch.zeros((), device=device), **moments}

    @torch.no_grad()
    def step(self, *, learning_rate: float, denominator: float, max_norm: float | None) -> float:
        """Update the weights from the summed gradients, and clear the sums. A collective.

        Args:
            denominator: the divisor of the summed gradients.
            max_norm: gradients with a larger norm are scaled down to it; None leaves them.

        Returns:
            The norm before clipping. If it is not finite, nothing was updated.
        """
        gradients = {}
        for name, parameter in self._parameters.items():
            shard, summed = self.shards[name], parameter.grad
            shard.grad = torch.zeros_like(shard) if summed is None else summed.to_local()
            parameter.grad = None
            gradients[name] = shard.grad
        torch._foreach_div_(list(gradients.values()), denominator)
        self._average(gradients)
        norm = self._norm(gradients)
        if math.isfinite(norm):
            if max_norm is not None and norm > max_norm:
                torch._foreach_mul_(list(gradients.values()), max_norm / norm)
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self.publish()
        self._adamw.zero_grad()
        return norm

    def publish(self, steps: int | None = None) -> None:
        """Gather the shards, if they stay gathered. A collective.

        Args:
            steps: how many are done, if the tensors of `state` were overwritten.
        """
        if steps is not None:
            for state in self._adamw.state.values():
                state["step"].fill_(steps)
        if self._stays_gathered:
            for unit in self._units:
                unit.reshard()
                unit.unshard()

    def _average(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Average the gradients of weights that all tensor parallel ranks have in full.

        In exact arithmetic they are the same anyway; on a GPU some kernels add in no fixed order,
        and the copies would drift apart.
        """
        alike = [one for name, one in gradients.items() if name not in self._divided]
        if self._tensor_group.size() == 1 or not alike:
            return
        summed = torch.cat([one.flatten() for one in alike])
        distributed.all_reduce(summed, group=self._tensor_group)
        pieces = summed.div_(self._tensor_group.size()).split([one.numel() for one in alike])
        for gradient, piece in zip(alike, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))

    def _norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Compute the L2 norm of the whole model's gradient: each shard, and each replicated
        weight, counts once."""
        squares = next(iter(gradients.values())).new_zeros(2)
        for name, gradient in gradients.items():
            squares[int(name in self._divided)] += gradient.square().sum()
        distributed.all_reduce(squares, group=self._group)
        distributed.all_reduce(squares[1:], group=self._tensor_group)  # of weights that are divided
        return float(squares.sum().sqrt())
