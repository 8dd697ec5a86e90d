"""A token's weight: it does not depend on how a step is cut into ranks and micro batches, and may
be a fraction, from the record to the loss and its gradient."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.errors import FatalSampleError

from launch.loop.loss import Normalization, row_loss
from launch.loop.metrics import StepCounts
from offline_packing.online.collate import padding_free_collator
from offline_packing.report.preview import preview
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.families import build_sample_encoder
from task_encoders.loading.packed_folder import PackedFolder
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.packs.pack import Pack
from task_encoders.records.record import to_sample
from task_encoders.samples import IGNORE_INDEX
from task_encoders.settings import PackingSettingsError
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all, write_json
from tests.helpers.formats import write_file
from tests.helpers.packed_runs import SEQ_LENGTH, make_config, make_trainer
from tests.world import Source, World, copy_of, task_encoder

_ = IGNORE_INDEX


def row(*samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, S) labels as the loader gives them, and (1, P + 1) boundaries."""
    labels = torch.tensor([[label for sample in samples for label in sample]])
    ends = np.cumsum([0, *map(len, samples)])
    return labels, torch.tensor(ends, dtype=torch.int32)[None]


def step_loss(
    rows: list[tuple[torch.Tensor, torch.Tensor]],
    losses: list[torch.Tensor],
    normalization: Normalization,
) -> float:
    total = denominator = 0.0
    for (labels, cu_lengths), token_losses in zip(rows, losses, strict=True):
        own = row_loss(token_losses, (labels != _).float(), cu_lengths, normalization)
        total, denominator = total + float(own[0]), denominator + float(own[1])
    return total / max(denominator, 1.0)


samples = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=6).map(
        lambda flags: [_, *(7 if flag else _ for flag in flags[1:])]
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(samples=samples, seed=st.integers(0, 99), cut=st.integers(0, 8))
@pytest.mark.parametrize("normalization", ["token", "sample", "sqrt"])
def test_the_loss_does_not_depend_on_how_a_step_is_cut(
    normalization: Normalization, samples: list[list[int]], seed: int, cut: int
) -> None:
    labels, cu_lengths = row(*samples)
    token_losses = torch.rand(labels.shape, generator=torch.Generator().manual_seed(seed))
    whole = step_loss([(labels, cu_lengths)], [token_losses], normalization)
    parts = [part for part in (samples[:cut], samples[cut:]) if part]
    lengths = [sum(map(len, part)) for part in parts]
    pieces = list(token_losses.split(lengths, dim=1))
    assert step_loss([row(*part) for part in parts], pieces, normalization) == pytest.approx(whole)
    # ... and is what a loop over samples would give
    split = list(token_losses.split([len(sample) for sample in samples], dim=1))
    means = [
        losses[0, torch.tensor(sample).roll(-1) != _]
        for sample, losses in zip(samples, split, strict=True)
    ]
    labelled = [values for values in means if len(values)]
    power = {"token": 1.0, "sample": 0.0, "sqrt": 0.5}[normalization]
    if labelled:
        shares = torch.tensor([len(values) ** power for values in labelled])
        means = [values.mean() for values in labelled]
        assert whole == pytest.approx(float((torch.stack(means) * shares).sum() / shares.sum()))


ANSWERS = {"Nothing of this.": 0, "A quarter counts.": 0.25, "All of it.": 1}


def conversation(*, image: bool = False) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for i, (answer, weight) in enumerate(ANSWERS.items()):
        messages.append({"role": "user", "content": "<image>Ask." if image and not i else "Ask."})
        messages.append({"role": "assistant", "content": answer, "weight": weight})
    return {"messages": messages, "images": ["a.jpg"] if image else []}


def weights_by_hand(encoder: Any, tokens: list[int]) -> list[float]:
    """Each token's weight: those of the answers, and of the end tokens after them."""
    weights, end = [0.0] * len(tokens), encoder.tokenizer.special_id("<|im_end|>")
    for answer, weight in ANSWERS.items():
        ids = [*encoder.tokenizer.encode(answer), end]
        for start in range(len(tokens)):
            if tokens[start : start + len(ids)] == ids:
                weights[start : start + len(ids)] = [weight] * len(ids)
    return weights


def weighted(folder: Path) -> Source:
    """Conversations with a picture and without, and questions that count whole."""
    write_file(folder / "a.jpg", image_bytes())
    for i in range(5):
        write_json(folder / f"a{i}.json", conversation(image=True))
        write_json(folder / f"b{i}.json", conversation())
        write_json(folder / f"c{i}.json", {"messages": dialogue("Ask.", "So."), "images": []})
    return {"format": "pairs", "path": str(folder), "task": "bmr"}


@pytest.fixture
def packed(world: World) -> Run:
    output = {"split": {"train": 0.7, "val": 0.3}, "split_seed": 3}
    return world.run(weighted, pack={"seq_length": SEQ_LENGTH}, output=output)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava_onevision_1_5"])
def test_every_token_has_the_weight_of_its_answer(family: str) -> None:
    encoder = build_sample_encoder(family=family)
    sample = to_sample(conversation(image=True), "k", "bmr")
    encoded = encoder.encode(sample, [image_bytes()])
    by_hand = weights_by_hand(encoder, encoded.tokens.tolist())
    assert encoded.loss_weights.tolist() == by_hand
    assert set(by_hand) == {0, 0.25, 1}
    measured = encoder.measure(sample, [(56, 56)])
    assert measured.num_loss_tokens == sum(weight > 0 for weight in by_hand)
    assert encoder.tokenize(sample, [(56, 56)]).loss_weights.tolist() == by_hand
    with pytest.raises(ValueError, match="which the loss of transformers' models does not take"):
        padding_free_collator([encoded])


def test_previews_have_the_weights(packed: Run) -> None:
    batch = PackedFolder(packed.workspace.root, task_encoder(packed)).batch([0])
    assert "labels" not in to_transformers_kwargs(batch)
    (pack,) = preview(packed, packs=["0"])
    weights = [span.weight for sub in pack.sub_samples for span in sub.spans]
    assert weights.count(0.25) > 1
    assert set(weights) == {0, 0.25, 1}


def test_verify_compares_weights(packed: Run, tmp_path: Path) -> None:
    run = copy_of(packed, tmp_path / "out")
    changed = 0
    for path in (tmp_path / "out").glob("*.tar"):
        data = path.read_bytes()
        changed += data.count(b"0.25")
        path.write_bytes(data.replace(b"0.25", b"0.75"))
    assert changed
    assert "text differs" in "\n".join(verify(run, deep=True).problems)


@pytest.mark.parametrize("normalization", ["token", "sample", "sqrt"])
def test_loss_and_gradient_are_those_by_hand(
    packed: Run, normalization: Normalization, tmp_path: Path, bmr_environment: None
) -> None:
    config = make_config(
        packed.workspace.root,
        tmp_path,
        batch={"global_batch_packs": 1},
        train={"iterations": 1, "normalization": normalization},
    )
    trainer, batches, model = make_trainer(config)
    row = batches.next()
    assert row is not None
    counts = StepCounts(torch.device("cpu"))
    loss = trainer._count_loss(row, counts)
    totals = counts.reduce(counts=True, stop=0)
    keep: dict[str, torch.Tensor] = {}
    hook = model.register_forward_hook(lambda _, __, out: keep.update(losses=out))
    trainer._count_loss(row, StepCounts(torch.device("cpu")))
    hook.remove()
    losses, weights = keep["losses"][0, :-1], row.loss_mask[0, 1:].double()
    bounds = row.cu_lengths[0].tolist()
    power = {"token": None, "sample": 0.0, "sqrt": 0.5}[normalization]
    total, share = torch.zeros((), dtype=torch.float64), 0.0
    for start, end in itertools.pairwise(bounds):
        own = slice(start, end - 1)
        w, selected = weights[own], torch.where(weights[own] > 0, losses[own].double(), 0.0)
        of_sample = float(w.sum()) if power is None else int((w > 0).sum()) ** power
        total = total + of_sample * (w * selected).sum() / w.sum()
        share += of_sample
    by_hand = total / share
    assert totals.loss == pytest.approx(float(by_hand), abs=1e-6)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours = torch.autograd.grad(loss / totals.denominator, parameters, allow_unused=True)
    theirs = torch.autograd.grad(by_hand, parameters, allow_unused=True)
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            assert torch.allclose(mine, other, atol=1e-6)
            compared += bool(mine.abs().max() > 1e-4)
    assert compared > 5


def test_a_trainer_whose_loss_takes_none_refuses_them(packed: Run) -> None:
    root = packed.workspace.root
    encoder = task_encoder(packed)
    folder = PackedFolder(root, encoder)
    with pytest.raises(PackingSettingsError, match="other than 0 and 1, which the loss of TRL"):
        encoder.check_trainer("TRL")
    with pytest.raises(PackingSettingsError, match="TRL"):
        PackedFolder(root, encoder)
    with pytest.raises(FatalSampleError, match="ps_00000000 holds loss weights"):
        encoder.encode_pack(Pack(*folder[0][:3]))


def test_whole_weights_are_written_as_ever(tmp_path: Path) -> None:
    content = conversation()
    content["messages"][3]["weight"] = 1
    write_json(tmp_path / "source" / "a.json", content)
    source = {"format": "pairs", "path": str(tmp_path / "source"), "task": "bmr"}
    run = make_run(source, tmp_path / "out", pack={"seq_length": SEQ_LENGTH})
    assert "loss_weights" not in pack_all(run)
    (pack,) = PackedFolder(tmp_path / "out")
    meta = pack.record["meta"]
    assert meta["turns"] == [[{"trained": False}, {}, {}]]
    assert "loss_weights" not in meta
    encoder = task_encoder(run)
    encoder.check_manifest(tmp_path / "out")
    encoder.check_trainer("TRL")
