"""Dialogues with tools, for LoongForge and its layout."""

import json
from pathlib import Path

from tests.helpers.datasets import dialogue, image_bytes

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SYSTEM = {"role": "system", "content": "Be brief."}


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
