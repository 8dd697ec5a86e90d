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
from task_encoders.settings import PackingSettingsError
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all, write_json
from tests.helpers.formats import write_file
from tests.helpers.packed_runs import SEQ_LENGTH, make_config, make_trainer
from tests.world import Source, World, copy_of, task_encoder

Samples = list[list[float]]
#: Weights of the tokens of each sample of a row. The first token of a sample has none.
SAMPLES = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6).map(
        lambda own: [0.0, *own[1:]]
    ),
    min_size=1,
    max_size=8,
)


def step_loss(
    rows: list[Samples], losses: list[torch.Tensor], normalization: Normalization
) -> float:
    """The loss of a step of rows, by sums over its micro batches."""
    total = denominator = 0.0
    for samples, token_losses in zip(rows, losses, strict=True):
        weights = torch.tensor([[weight for sample in samples for weight in sample]])
        bounds = torch.tensor(np.cumsum([0, *map(len, samples)]), dtype=torch.int32)[None]
        own = row_loss(token_losses, weights, bounds, normalization)
        total, denominator = total + float(own[0]), denominator + float(own[1])
    return total / (denominator or 1.0)


@settings(max_examples=60, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 99), cut=st.integers(0, 8))
@pytest.mark.parametrize("normalization", ["token", "sample", "sqrt"])
def test_the_loss_does_not_depend_on_how_a_step_is_cut(
    normalization: Normalization, samples: Samples, seed: int, cut: int
) -> None:
    lengths = [len(sample) for sample in samples]
    losses = torch.rand(1, sum(lengths), generator=torch.Generator().manual_seed(seed))
    whole = step_loss([samples], [losses], normalization)
    parts = [part for part in (samples[:cut], samples[cut:]) if part]
    pieces = list(losses.split([sum(map(len, part)) for part in parts], dim=1))
    assert step_loss(parts, pieces, normalization) == pytest.approx(whole)
    # ... and is what a loop over samples would give
    power, total, shares = {"sample": 0.0, "sqrt": 0.5}.get(normalization), 0.0, 0.0
    for sample, own in zip(samples, losses[0].split(lengths), strict=True):
        weights = torch.tensor(sample).roll(-1)
        if not weights.any():
            continue
        count, mean = int((weights > 0).sum()), (weights * own).sum() / weights.sum()
        share = float(weights.sum()) if power is None else count**power
        total, shares = total + share * float(mean), shares + share
    assert whole == pytest.approx(total / (shares or 1.0))


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


def test_a_step_weighs_them(packed: Run, tmp_path: Path, bmr_environment: None) -> None:
    train = {"iterations": 1, "normalization": "sqrt"}
    config = make_config(packed.workspace.root, tmp_path, train=train)
    trainer, batches, model = make_trainer(config)
    row, counts, made = batches.next(), StepCounts(torch.device("cpu")), list[torch.Tensor]()
    assert row is not None
    assert {*row.loss_mask.unique().tolist()} == {0, 0.25, 1}
    model.register_forward_hook(lambda _, __, losses: made.append(losses.detach()))
    trainer._count_loss(row, counts)
    ends = row.cu_lengths[0].tolist()
    samples = [row.loss_mask[0, a:b].tolist() for a, b in itertools.pairwise(ends)]
    expected = step_loss([samples], made, "sqrt")
    assert counts.reduce().loss == pytest.approx(expected, rel=1e-6)


def test_previews_and_verify_have_the_weights(packed: Run, tmp_path: Path) -> None:
    (pack,) = preview(packed, packs=["0"])
    weights = [span.weight for sub in pack.sub_samples for span in sub.spans]
    assert weights.count(0.25) > 1
    assert {*weights} == {0, 0.25, 1}
    run = copy_of(packed, tmp_path / "out")
    for path in (tmp_path / "out").glob("*.tar"):
        path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))
    assert "text differs" in "\n".join(verify(run, deep=True).problems)


def test_a_trainer_whose_loss_takes_none_refuses_them(packed: Run) -> None:
    root = packed.workspace.root
    encoder = task_encoder(packed)
    folder = PackedFolder(root, encoder)
    assert "labels" not in to_transformers_kwargs(folder.batch([0]))
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
