"""NeMo 2.0.0: the strings of its conversation modules, and the packs of its packing for NeVA.

What they gave is stored beside this file. With NEMO=FOLDER, a checkout of that version, they are
asked again; `python -m tests.examples.test_nemo FOLDER` stores what they say.
"""

import ast
import hashlib
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offline_packing.planner.plan_packs import plan_packs
from task_encoders.families import build_sample_encoder
from task_encoders.samples import SourceSample, Turn
from task_encoders.text.pieces import Answer, Control, Image, Text
from tests.helpers.texts_and_images import KINDS, random_text, random_turns
from tests.helpers.tiny_tokenizers import save_llama_tokenizer

STORED = Path(__file__).with_name("nemo_2_0_0.json")
#: Two modules, and what ends an answer before the next question. The older one's <extra_id_7> is
#: mapped to </s> after the tokenizer; its blank is the one that LLaMA's puts in front of any text.
CONVERSATIONS = {
    "nemo/collections/vlm/neva/data/conversation.py": ("</s>USER:", "</s>"),
    "nemo/collections/multimodal/data/neva/conversation.py": ("<extra_id_7> USER:", "<extra_id_7>"),
}
PACKING = "examples/multimodal/multimodal_llm/neva/sequence_packing/preprocess_dataset.py"
ALGORITHMS = ("first_fit_decreasing", "first_fit_shuffle", "shuffle_and_pack")
SEQ_LENGTH, SEED = 12_288, 42

needs_nemo = pytest.mark.skipif("NEMO" not in os.environ, reason="NEMO names no checkout of NeMo")


def draw_dialogues(template: str) -> list[SourceSample]:
    """300 conversations with 0 to 4 images, at any place in a question; or 300 captions."""
    rng = np.random.default_rng(7)
    found: list[SourceSample] = []
    while len(found) < 300:
        num_images = 1 if template == "plain" else int(rng.integers(0, 5))
        if template == "plain":
            turns: tuple[Turn, ...] = (Turn("<image>", random_text(rng, int(rng.integers(1, 40)))),)
        else:
            turns = random_turns(rng, KINDS[len(found) % len(KINDS)], num_images)
            if num_images and not any("<image>" in turn.prompt for turn in turns):
                continue  # to NeVA, a conversation without an image
        names = tuple(map(str, range(num_images)))
        found.append(SourceSample(str(len(found)), "bmr", turns, names))
    return found


def draw_lengths() -> np.ndarray:
    """21,000 lengths of dialogues over one image: two chunks of first_fit_shuffle."""
    rng = np.random.default_rng(3)
    return (576 + np.exp(rng.normal(5.2, 0.8, 21_000))).astype(np.int64).clip(600, 4_000)


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


# Ours.


def our_string(encoder: Any, sample: SourceSample) -> str:
    """The text that the pieces spell after the <s> that LLaMA's tokenizer puts in front."""
    spelled = ""
    for piece in encoder.parts(sample):
        match piece:
            case Control(token=token):
                spelled += token
            case Answer(header=header, text=text):
                spelled += header + text
            case Text(text=text):
                spelled += text
            case Image():
                spelled += "<image>"
    assert spelled.startswith("<s>")
    return spelled.removeprefix("<s>")


@pytest.mark.parametrize(("template", "own"), [("v1", "neva"), ("plain", "plain")])
def test_strings_and_token_ids_are_those_of_the_conversation_module(
    template: str, own: str, tmp_path: Path
) -> None:
    """Strings are cut at the images, as NeVA cuts them; loss on answers and what ends them."""
    save_llama_tokenizer(tmp_path)
    options = {"template": own, "image_size": 56, "patch_size": 14}
    encoder: Any = build_sample_encoder("llava_1_5", str(tmp_path), **options)
    stored = json.loads(STORED.read_text())["strings"][template]
    samples = draw_dialogues(template)
    strings = [our_string(encoder, sample) for sample in samples]
    assert strings[: len(stored["first"])] == stored["first"]
    assert (len(strings), digest(strings)) == (stored["strings"], stored["digest"])
    backend = encoder.tokenizer._backend
    for sample, string in zip(samples, strings, strict=True):
        sizes = [(56, 56)] * len(sample.images)
        text = encoder.tokenize(sample, sizes)
        collapsed = text.tokens.tolist()
        for start, count in reversed(text.images):
            collapsed[start : start + count] = [-1]
        ids: list[int] = []
        for i, part in enumerate(string.split("<image>")):
            for j, words in enumerate(part.split("</s>")):
                ids += [encoder.tokenizer.special_id("</s>")] if j else [-1] if i else []
                ids += backend.encode(words, add_special_tokens=False).ids if words else []
        assert collapsed == [encoder.tokenizer.special_id("<s>"), *ids]
        trained = text.tokens[text.loss_weights > 0].tolist()
        answers = [turn.answer + ("\n" if template == "plain" else "") for turn in sample.turns]
        spelled = "".join(part for part, _ in encoder.tokenizer.spell(trained))
        joined = "</s>".join(answers) + ("" if template == "plain" else "</s>")
        assert spelled.replace(" ", "") == joined.replace(" ", "")


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "first_fit_shuffle"))
        for name in ALGORITHMS
    ],
)
def test_packs_are_those_of_the_preprocessing(algorithm: str) -> None:
    stored, lengths = json.loads(STORED.read_text())["packs"][algorithm], draw_lengths()
    plan = plan_packs(lengths, SEQ_LENGTH, strategy=algorithm, seed=SEED)
    packs = sorted(lengths[ids].tolist() for ids in plan)
    assert (len(packs), digest(packs)) == (stored["packs"], stored["digest"])


# Theirs.


def nemo_strings(folder: Path, template: str) -> list[list[str]]:
    """Tokens of each dialogue, by each conversation module."""
    found = []
    for name, (between, end) in CONVERSATIONS.items():
        if template == "plain" and end != "</s>":
            continue  # the older one's messages are joined outside of the module
        spec: Any = importlib.util.spec_from_file_location("nemo_conversation", folder / name)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        strings = []
        for sample in draw_dialogues(template):
            conversation = module.conv_templates[template].copy()
            conversation.messages = []
            for turn in sample.turns:
                conversation.append_message(conversation.roles[0], turn.prompt)
                conversation.append_message(conversation.roles[1], turn.answer)
            string = conversation.get_prompt().replace(between, "</s>USER:")
            strings.append(string.replace(end, "</s>"))
        found.append(strings)
    return found


def nemo_packs(folder: Path, algorithm: str, lengths: np.ndarray) -> list[list[int]]:
    """By the functions of the script, whose other imports are not needed; with our shuffle."""

    def shuffle(values: Any) -> None:
        values[:] = [values[i] for i in np.random.default_rng(SEED).permutation(len(values))]

    tree = ast.parse((folder / PACKING).read_text())
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name not in ("main", "get_args")
    ]
    names: dict[str, Any] = {
        "np": SimpleNamespace(array=np.array, random=SimpleNamespace(shuffle=shuffle)),
        "tqdm": lambda values: values,
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "as_completed": as_completed,
    }
    exec(compile(tree, PACKING, "exec"), names)
    packs = names[algorithm](lengths.tolist(), SEQ_LENGTH)
    return sorted([int(length) for length in pack] for pack in packs)


def ask(folder: Path) -> dict[str, Any]:
    """The stored tokens and loss runs."""
    strings = {}
    for template in ("v1", "plain"):
        first, *others = nemo_strings(folder, template)
        assert all(other == first for other in others)
        strings[template] = {"first": first[:4], "strings": len(first), "digest": digest(first)}
    packs = {}
    for algorithm in ALGORITHMS:
        found = nemo_packs(folder, algorithm, draw_lengths())
        packs[algorithm] = {"packs": len(found), "digest": digest(found)}
    return {"version": "NVIDIA/NeMo v2.0.0 (e938df32)", "strings": strings, "packs": packs}


@needs_nemo
def test_what_is_stored_is_what_nemo_says() -> None:
    assert ask(Path(os.environ["NEMO"])) == json.loads(STORED.read_text())


if __name__ == "__main__":
    STORED.write_text(json.dumps(ask(Path(sys.argv[1])), indent=1, ensure_ascii=False) + "\n")
