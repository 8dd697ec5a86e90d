"""The model of megatron-core's layers: losses in chunks, recomputation, frozen parts, rotary
angles, and what is refused."""

from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models import backends
from megatron.core.transformer import transformer_block
from torch.utils._python_dispatch import TorchDispatchMode

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model import packed_model
from launch.model.config import ModelConfig
from launch.model.megatron import model as megatron_model
from launch.model.megatron.model import PackedMegatronModel, build_model
from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.tiny_checkpoints import (
    IMAGE,
    VOCAB_SIZE,
    forward,
    gradients_of,
    packed_batch,
    row_samples,
    transformers_model,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _single_process() -> None:
    initialize_parallel(1)


def batch_of(row: str) -> PackedBatch:
    return packed_batch(row_samples(transformers_model("qwen2_vl", tied=True), row))


def build(*, text: Any = None, **config: Any) -> PackedMegatronModel:
    """The tiny preset with the words and the image token of the rows."""
    text = {"vocab_size": VOCAB_SIZE, **(text or {})}
    model = build_model(ModelConfig(text=text, **config), device=CPU).train()
    model.hf_config.image_token_id = IMAGE
    return model


def token_losses(model: Any, batch: PackedBatch, labels: torch.Tensor | None = None) -> Any:
    return forward(model, batch, shift_labels(batch.labels) if labels is None else labels)


def test_apex_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core then takes Apex's norm for the last one, which is a LayerNorm only."""
    for module, name in ((transformer_block, "LayerNormImpl"), (backends, "LNImpl")):
        monkeypatch.setattr(module, name, FusedLayerNorm)
    model = build(family="qwen3_vl").language_model
    norms = [module for name, module in model.named_modules() if name.endswith("layernorm")]
    rms = [module for module in norms if isinstance(module, torch.nn.RMSNorm)]
    assert len(rms) == 4 * len(model.decoder.layers) + 1  # of queries and keys, too


TOWER = {"vision", "projector"}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_recompute_keeps_less_and_changes_no_bit(family: str) -> None:
    """And runs no backward pass through what is frozen."""
    batch = batch_of("mixed")
    found, kept_bytes = {}, {}
    for recompute in ("none", "full"):
        vision = {"patch_size": 14} if family == "qwen3_vl" else {}  # that of the row
        model = build(family=family, recompute=recompute, vision=vision)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if tensor.shape[-1:] != (VOCAB_SIZE,):  # logits would hide everything else
                kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        labels = shift_labels(batch.labels).index_fill(1, torch.arange(20, 100), IGNORE_INDEX)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = token_losses(model, batch, labels)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept_bytes[recompute] = sum(size for key, size in kept.items() if key not in weights)
        losses.sum().backward()
        found[recompute] = losses, gradients_of(model)
    losses, expected = found["none"]
    assert torch.equal(found["full"][0], losses)
    assert set(found["full"][1]) == set(expected)
    for name, gradient in expected.items():
        assert torch.equal(found["full"][1][name], gradient), name
    assert kept_bytes["full"] < 0.5 * kept_bytes["none"]
    frozen, features = build(family=family, recompute="full", vision=vision, freeze=TOWER), []
    frozen.visual.register_forward_hook(lambda *given: features.append(given[2].pooler_output))
    token_losses(frozen, batch, labels).sum().backward()
    assert [one.requires_grad for one in features] == [False]


def test_gradients_of_the_head_add_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, 256 + 1 is 256. No more than one of them exists at once."""
    monkeypatch.setattr(packed_model, "LOSS_CHUNK", 1)
    head = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    labels, events = torch.zeros(1000, dtype=torch.int64), list[str]()

    def losses_at(positions: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        if len(events) < 1000:  # not in the backward pass
            head.register_hook(lambda _: events.append("gradient"))
        events.append(f"{len(positions)} losses")
        return head[0, :1] * torch.ones(len(positions), dtype=head.dtype)

    packed_model.token_losses(labels, head, losses_at).sum().backward()
    assert events == ["1 losses"] * 1000 + ["1 losses", "gradient"] * 1000
    assert head.grad is not None
    assert head.grad.tolist() == [[1000, 0], [0, 0]]


def test_fused_layers_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as they are, not compiled."""
    monkeypatch.setattr(torch._dynamo.config, "disable", True)
    batch, found = batch_of("mixed"), []
    config_of = megatron_model.transformer_config
    for fused in (False, True):

        def choose(*given: Any, fused: bool, own: bool = fused, **options: Any) -> Any:
            return config_of(*given, fused=own, **options)

        monkeypatch.setattr(megatron_model, "transformer_config", choose)
        model = build()
        losses = token_losses(model, batch)
        losses.sum().backward()
        core = model.language_model.config
        assert (core.bias_activation_fusion, core.bias_dropout_fusion) == (fused, fused)
        found.append((losses, gradients_of(model)))
    (expected, expected_gradients), (losses, own) = found
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=1e-4)
    monkeypatch.undo()
    assert "no fusions" in build().kernels()


class CountReads(TorchDispatchMode):
    """Counts how often the value of a tensor is asked for, which on a GPU waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_layers_ask_for_no_value_of_a_tensor() -> None:
    batch = batch_of("no_image")
    params = to_packed_seq_params(batch)
    reads = []
    for num_layers in (1, 3):
        model = build(text={"num_hidden_layers": num_layers})
        with CountReads() as counter:
            model(batch, params)
        reads.append(counter.count)
    assert reads[0] == reads[1]
    with CountReads() as counter:
        int(batch.tokens.sum())
    assert counter.count == 1


@pytest.mark.parametrize(
    ("parts", "row"),
    [
        (["vision"], "mixed"),
        (["vision", "projector"], "no_image"),
        (["projector"], "mixed"),
        (["language"], "mixed"),
        (["vision", "language"], "no_image"),
    ],
)
def test_frozen_parts_get_no_gradient(parts: list[str], row: str) -> None:
    model, batch = build(freeze=parts), batch_of(row)
    token_losses(model, batch).sum().backward()
    trained = set()
    for name, gradient in gradients_of(model).items():
        assert torch.isfinite(gradient).all()
        if name.startswith("visual.merger."):
            trained.add("projector")
        else:
            trained.add("vision" if name.startswith("visual.") else "language")
    expected = {"vision", "projector", "language"} - set(parts)
    assert trained == (expected if row == "mixed" else expected & {"language"})


def test_bfloat16_is_close_to_float32() -> None:
    batch = batch_of("mixed")
    exact = token_losses(build(), batch)
    model = build(dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rounded = token_losses(model, batch)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0)


def test_images_that_do_not_belong_to_the_tokens_are_refused() -> None:
    model, batch = build(), batch_of("one_image")
    batch.tokens[0, (batch.tokens[0] == IMAGE).nonzero()[0]] = 5
    with pytest.raises(ValueError, match="28 image tokens in the row, 29 image features"):
        token_losses(model, batch)
