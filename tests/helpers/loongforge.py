"""LoongForge's own cookers and task encoder from a checkout, and data for it.

Its package imports Megatron's trainer when it is imported as a whole; its data code takes of that
only the arguments, the tokenizer and the chat template, which `install` and `task_encoder` provide.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.helpers.datasets import dialogue, image_bytes

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SYSTEM = {"role": "system", "content": "Be brief."}

#: Arguments that its data code reads, filled in by `task_encoder`.
_GIVEN: dict[str, Any] = {}


def install(checkout: Path) -> None:
    """Make `loongforge.data` importable from a checkout."""
    for name in ("loongforge", "loongforge.data", "loongforge.utils", "loongforge.tokenizer"):
        module = ModuleType(name)
        module.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = module
    utils: Any = sys.modules["loongforge.utils"]
    utils.get_args = lambda: _GIVEN["args"]
    utils.get_tokenizer = lambda: _GIVEN["tokenizer"]
    utils.get_chat_template = lambda: _GIVEN["template"]


def task_encoder(checkpoint: Path, template: str | None, seq_length: int, **limits: int) -> Any:
    """Its VLMTaskEncoder for a checkpoint's processor. `template`: the name of a chat template;
    None: its pre-training phase, which has none. `limits`: min_pixels and max_pixels."""
    from loongforge.data.chat_template import ChatTemplate
    from loongforge.data.multimodal.vlm_task_encoder import VLMTaskEncoder
    from loongforge.tokenizer.tokenization_hf import AutoTokenizerFromHF

    args = {
        "training_phase": "pretrain" if template is None else "sft",
        "hf_tokenizer_path": str(checkpoint),
        "seq_length": seq_length,
        "image_resolution": 1 << 20,  # larger images would be made smaller first
        # As Qwen2-VL's video processor: it takes 1.05 times the least, and frames share the last.
        "frame_min_pixels": 95_574,
        "frame_max_pixels": 602_112,
        "video_max_pixels": 602_112 * 768 // 2,
        "fps": 2.0,
        "fps_min_frames": 4,
        "fps_max_frames": 768,
        "enable_discard_sample": False,
        "packing_pretrain_data": False,
        "packing_sft_data": False,
        "max_packed_tokens": seq_length,
        "num_images_expected": 1 << 20,
        "max_buffer_size": 1,
        "sft_dataset": None,
        "sft_dataset_config": None,
    }
    _GIVEN["args"] = Namespace(**args | limits)
    _GIVEN["tokenizer"] = AutoTokenizerFromHF(str(checkpoint), True, "right", 1 << 30, False)
    _GIVEN["template"] = template and ChatTemplate.from_name(template)
    return VLMTaskEncoder(_GIVEN["args"])


def tool_dialogues(root: Path) -> Path:
    """Dialogues on a picture, some with tools, some with a system message; two without a picture;
    and four that the layout cannot hold: an answer without loss, one that begins with a line
    break, an empty system message, a small picture."""
    root.mkdir(parents=True)
    (root / "0.jpg").write_bytes(image_bytes(84, 56))
    (root / "small.jpg").write_bytes(image_bytes(300, 27))
    found = []
    for i in range(12):
        messages = dialogue(f"<image>What is {i}?", "A number.", "Sure?", "Yes. " * (i + 1))
        record = {"messages": messages, "images": ["0.jpg"], "id": f"plain{i}"}
        if i % 3 == 0:
            record["messages"] = [SYSTEM, *messages]
        if i % 4 == 0:
            called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            result = {"role": "tool", "content": "Rain."}
            answer = {"role": "assistant", "content": "Take a coat."}
            asked = {"role": "user", "content": "And the weather?"}
            record["messages"] = [*record["messages"], asked, called, result, answer]
            record["tools"] = [WEATHER]
        found.append(record)
    untrained = dialogue("<image>Who?", "Nobody.", "Who?", "Me.")
    untrained[1]["loss_weight"] = 0  # type: ignore[assignment]
    empty = [{**SYSTEM, "content": ""}, *dialogue("Who?", "Me.")]
    line = dialogue("<image>A line?", "Yes.")
    found += [
        {"messages": untrained, "images": ["0.jpg"], "id": "untrained"},
        {"messages": dialogue("Why?", " \n\nBecause."), "id": "break"},
        {"messages": empty, "id": "empty"},
        {"messages": line, "images": ["small.jpg"], "id": "small"},
        *({"messages": dialogue("No picture?", "None."), "id": f"text{i}"} for i in range(2)),
    ]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, found)))
    return root / "data.jsonl"
