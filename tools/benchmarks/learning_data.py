"""The demo's questions and dialogues for its own tiny model with few words: a vocabulary of 2,048
byte pairs, packs, the same samples one by one, and random weights to begin with."""

import contextlib
import json
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from launch.model.config import config_of_preset, transformers_classes
from offline_packing.config.packing import parse_config
from offline_packing.demo.generate import generate_demo_dataset
from offline_packing.engines.local import LocalEngine
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run
from offline_packing.write.write import write
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN_PATTERN, QWEN_SPECIAL_TOKENS

SEQ_LENGTH: Final = 1024
VOCAB_SIZE: Final = 2048
#: 16 image tokens at most
MAX_PIXELS: Final = 16 * 28 * 28
#: of the stored pictures, in pixels
SIDE: Final = 160
#: How samples are put in packs: the planner's way; in random order, until the next does not fit; or
#: each alone, in random order.
FORMS: Final[dict[str, dict[str, Any]]] = {
    "packed": {"strategy": "auto"},
    "random": {"strategy": "shuffle_and_pack"},
    "alone": {"strategy": "sequential", "strategy_options": {"max_samples": 1}},
}


def prepare(folder: Path, num_samples: int, seeds: int) -> None:
    """Write FOLDER/data, tokenizer, weightsN, packedN, randomN and aloneN for each seed N; what is
    there is kept."""
    data = folder / "data"
    generate_demo_dataset(data, seed=0, num_samples=num_samples, progress=False)
    tokenizer = folder / "tokenizer"
    if not tokenizer.is_dir():
        _shrink_pictures(data)
        _save_tokenizer(data, tokenizer)
    for seed in range(seeds):
        if not (weights := folder / f"weights{seed}").is_dir():
            _save_weights(tokenizer, weights, seed)
        for form in FORMS:
            if not (folder / f"{form}{seed}" / "manifest.json").is_file():
                _pack(folder, form, seed)


def _shrink_pictures(data: Path) -> None:
    """Make pictures about as small as the model sees them, so that decoding takes little time."""
    for path in sorted([*data.rglob("*.jpg"), *data.rglob("*.png")]):
        with contextlib.suppress(OSError), Image.open(path) as image:  # one is cut on purpose
            exif = image.getexif()
            image.thumbnail((SIDE, SIDE))
            image.save(path, exif=exif)


def _save_tokenizer(data: Path, folder: Path) -> None:
    """Qwen's kind of tokenizer, trained on the texts."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = Split(Regex(QWEN_PATTERN), "isolated")
    backend.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(QWEN_SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*_texts(data), "system\nuser\nassistant\n"], trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in QWEN_SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(QWEN_SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = QWEN2_VL_TEMPLATE
    tokenizer.save_pretrained(folder)


def _texts(data: Path) -> list[str]:
    lines = [path.read_bytes() for path in sorted(data.glob("*/*.json"))]
    lines += (data / "bmr_jsonl/dialogues.jsonl").read_bytes().splitlines()
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # one is broken on purpose
            continue
        found += [message["content"] for message in record.get("messages", ())]
    return found


def _save_weights(tokenizer: Path, folder: Path, seed: int) -> None:
    """The demo's model with random weights, and the ids of that vocabulary."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"].strip("<|>"): token["id"] for token in vocabulary}
    names = {"vision_start": "vision_start", "vision_end": "vision_end"}
    names |= {"image": "image_pad", "video": "video_pad"}
    whole = {f"{name}_token_id": ids[token] for name, token in names.items()}
    ends = {"bos_token_id": ids["endoftext"], "eos_token_id": ids["im_end"]}
    config = config_of_preset("qwen2_vl", "tiny", {"vocab_size": VOCAB_SIZE, **ends}, **whole)
    torch.manual_seed(seed)
    transformers_classes("qwen2_vl").model._from_config(config).save_pretrained(folder)


def _pack(folder: Path, form: str, seed: int) -> None:
    sources = [("pairs", "vqa"), ("pairs", "bmr"), ("jsonl", "bmr_jsonl/dialogues.jsonl")]
    content = {
        "source": [
            {"format": kind, "path": str(folder / "data" / path), "task": "bmr"}
            for kind, path in sources
        ],
        "model": {"processor": str(folder / "tokenizer"), "max_pixels": MAX_PIXELS},
        "pack": {"seq_length": SEQ_LENGTH, "seed": seed, **FORMS[form]},
        "output": {
            "path": str(folder / f"{form}{seed}"),
            "split": {"train": 0.8, "val": 0.2},
            "overwrite": True,
        },
    }
    run = Run(parse_config(content), LocalEngine(0))
    samples = measure(run)
    write(run, samples, plan(run, samples))
