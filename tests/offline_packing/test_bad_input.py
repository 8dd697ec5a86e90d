"""Each kind of bad, and of merely unusual, input: one real run of measure over all."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from PIL import features

from offline_packing.sources.formats import jsonl, pairs
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_run,
    outcomes,
    png,
    write_json,
)

JPEG = image_bytes()
ASK = dialogue("<image>\nWhat is this?", "A square.")

#: File name -> content: bytes as they are, a function that makes the file, anything else as JSON.
Files = Mapping[str, Any]


def record(messages: Any = ASK, **fields: Any) -> dict[str, Any]:
    return {"messages": messages, **fields}


def said(*texts: str) -> dict[str, Any]:
    return record(dialogue(*texts), images=[])


def spoken(*roles: str) -> dict[str, Any]:
    return record([{"role": role, "content": "text"} for role in roles], images=[])


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


#: Reason, what stands in the JSON, and other files.
BAD: dict[str, tuple[Any, ...]] = {
    "json_broken": ("bad_json", b'{"messages": ['),
    "json_empty": ("bad_json", b""),
    "json_not_utf8": ("bad_json", '{"caption": "é"}'.encode("latin-1")),
    "json_nan": ("bad_json", b'{"caption": NaN}'),
    "json_lone_surrogate": ("bad_json", rb'{"caption": "\ud800"}'),
    "json_too_deep": ("bad_json", nested(100_000)),
    "json_dangling_link": ("bad_json", link_to("nowhere.json")),
    "json_link_outside": ("path_outside_root", link_to("../outside.json")),
    "json_list": ("bad_record", [1, 2]),
    "json_text": ("bad_record", "hello"),
    "record_empty": ("bad_record", {}),
    "messages_text": ("bad_record", record("hello", images=[])),
    "messages_empty": ("bad_record", record([], images=[])),
    "message_no_content": ("bad_record", record([{"role": "user"}], images=[])),
    "message_content_list": (
        "bad_record",
        record([{"role": "user", "content": [{"type": "text"}]}], images=[]),
    ),
    "images_numbers": ("bad_record", record(images=[7])),
    "video_missing": ("missing_image", record(images=[], videos=["a.mp4"])),
    "no_question": ("bad_record", {"answer": "Blue.", "images": []}),
    "two_questions_one_answer": (
        "bad_record",
        {"question": ["a", "b"], "answer": "Blue.", "images": []},
    ),
    "answer_object": ("bad_record", {"question": "a", "answer": [7, {}], "images": []}),
    "roles_assistant_first": ("bad_roles", spoken("assistant", "user")),
    "roles_two_users": ("bad_roles", spoken("user", "user", "assistant")),
    "roles_ends_with_user": ("bad_roles", spoken("user", "assistant", "user")),
    "roles_system_only": ("bad_roles", spoken("system")),
    "roles_system_inside": ("bad_roles", spoken("user", "assistant", "system")),
    "roles_unknown": ("bad_roles", spoken("narrator", "critic")),
    "roles_system_assistant": ("bad_roles", spoken("system", "assistant")),
    "roles_two_assistants": ("bad_roles", spoken("user", "assistant", "assistant")),
    "roles_unknown_between": ("bad_roles", spoken("user", "critic", "assistant")),
    "roles_user_tool": ("bad_roles", spoken("user", "tool")),
    "roles_user": ("bad_roles", spoken("user")),
    "answer_empty": ("empty_answer", said("Hello", "")),
    "answer_blank": ("empty_answer", said("Hello", " \n\t")),
    "second_answer_empty": ("empty_answer", said("Hello", "Hi", "And?", "")),
    "count_too_many_tags": (
        "image_count_mismatch",
        record(dialogue("<image><image>", "x")),
        {".jpg": JPEG},
    ),
    "count_too_many_images": (
        "image_count_mismatch",
        record(images=["a.jpg", "b.jpg"]),
        {"/a.jpg": JPEG},
    ),
    "count_tag_without_image": ("image_count_mismatch", record(images=[])),
    "image_missing": ("missing_image", record(images=["nowhere.jpg"])),
    "image_not_beside": ("missing_image", record()),
    "image_other_format": ("missing_image", record(), {".heic": JPEG}),
    "image_is_folder": ("missing_image", record(images=["image_is_folder"])),
    "image_is_pipe": ("missing_image", record(), {".jpg": lambda path: os.mkfifo(path)}),
    "image_name_empty": ("missing_image", record(images=[""])),
    "image_name_nul": ("missing_image", record(images=["a\0.jpg"])),
    "image_name_too_long": ("missing_image", record(images=["a" * 300 + ".jpg"])),
    "image_url": ("missing_image", record(images=["https://example.org/a.jpg"])),
    "image_link_loop": ("missing_image", record(), {".jpg": link_to("image_link_loop.jpg")}),
    "image_ambiguous": ("ambiguous_image", record(), {".jpg": JPEG, ".png": JPEG}),
    "path_parent": ("path_outside_root", record(images=["../outside.jpg"])),
    "path_absolute": ("path_outside_root", record(images=["/etc/hostname"])),
    "path_sibling": ("path_outside_root", record(images=["../data_secret/a.jpg"])),
    "path_link": ("path_outside_root", record(), {".jpg": link_to("../outside.jpg")}),
    "path_link_folder": (
        "path_outside_root",
        record(images=["linked/outside.jpg"]),
        {"/../linked": link_to("..")},
    ),
    "image_zero_bytes": ("bad_image", record(), {".jpg": b""}),
    "image_text": ("bad_image", record(), {".jpg": b"<html>404 not found</html>"}),
    "image_pickle": ("bad_image", record(), {".png": b"\x80\x04N."}),
    "image_cut_in_header": ("bad_image", record(), {".jpg": JPEG[:300]}),
    "image_truncated_jpeg": ("truncated_image", record(), {".jpg": JPEG[:-40]}),
    "image_truncated_png": (
        "truncated_image",
        record(),
        {".png": image_bytes(image_format="PNG")[:-60]},
    ),
    "image_bomb": ("image_too_large", record(), {".png": png(60_000, 60_000, b"", 2)}),
    "image_large": ("image_too_large", record(), {".png": png(3_000, 3_000, b"", 2)}),
    "image_fills": ("too_costly", record(), {".jpg": b"\xff\xd8" + b"\xff" * 40_000}),
    "image_names": ("too_costly", record(dialogue("What?", "x"), images=["a.jpg"] * 5000)),
    "messages_many": ("too_costly", said(*["Hi", "Hello"] * 25_001)),
    "text_long": ("too_costly", said("Hi", "a" * 2_000_001)),
    "text_white_space": ("too_costly", said("a" + " " * 1_000_000 + "x", "b")),
    "text_marks": ("too_costly", said("Hi", "a" + "\u0301\u0323" * 3000)),
    "json_values": ("too_costly", b'{"a": [' + b"{}," * 1_100_000 + b"1]}"),
    "calls_nested": (
        "unexpected_error",
        record([ASK[0], call("f", json.loads(nested(300)))], images=[]),
    ),
    "image_narrow": ("aspect_ratio", record(), {".jpg": image_bytes(8, 1700)}),
    "image_wide": ("aspect_ratio", record(), {".jpg": image_bytes(1700, 8)}),
}

GOOD: dict[str, tuple[Any, ...]] = {
    "name.with.dots": (record(), {".jpg": JPEG}),
    "name with spaces": (record(), {".jpg": JPEG}),
    "name:with:colons": (record(), {".jpg": JPEG}),
    "name_emoji_🙂": (record(), {".jpg": JPEG}),
    "名字": (record(), {".jpg": JPEG}),
    "name'with\"quotes": (record(), {".jpg": JPEG}),
    "-rf": (record(), {".jpg": JPEG}),
    "special_tokens": (said("<|im_end|><|im_start|>system", "<|image_pad|><|vision_start|>"),),
    "image_tag_in_answer": (said("What marks an image?", "<image> does."),),
    "byte_order_mark": (b"\xef\xbb\xbf" + json.dumps(said("Hi", "Hello")).encode(),),
    "crlf": (json.dumps(said("Hi\r\nyou", "Hello"), indent=2).encode(),),
    "images_null": (record(images=None), {".jpg": JPEG}),
    "image_one": (record(image="image_one/a.jpg"), {"/a.jpg": JPEG}),
    "image_no_tag": (record(dialogue("What?", "A square.")), {".jpg": JPEG}),
    "image_upper_case": (record(), {".JPG": JPEG}),
    "image_wrong_extension": (record(), {".jpg": image_bytes(image_format="PNG")}),
    "image_webp": (record(), {".webp": image_bytes(image_format="WEBP")}),
    **(
        {"image_avif": (record(), {".avif": image_bytes(image_format="AVIF")})}
        if features.check("avif")
        else {}
    ),
    "image_gif": (record(), {".gif": image_bytes(image_format="GIF")}),
    "image_bytes_behind": (record(), {".jpg": JPEG + b"trailing"}),
    "image_one_pixel": (record(), {".png": image_bytes(1, 1, "PNG")}),
    "image_link_inside": (record(), {".jpg": link_to("名字.jpg")}),
    "image_parent_inside": (record(images=["image_parent_inside/../image_one/a.jpg"]),),
    "image_twice": (record(dialogue("<image><image>", "Same."), images=["名字.jpg", "名字.jpg"]),),
    "question_answer": ({"question": "<image>Colour?", "answer": "Blue."}, {".jpg": JPEG}),
    "context_answers": ({"context": "Colour?", "answers": ["Blue."]}, {".jpg": JPEG}),
    "turns_as_lists": ({"prompt": ["a", "b"], "captions": ["c", {"content": "d"}], "images": []},),
    "field_nested": (
        b'{"messages": %b, "images": ["image_one/a.jpg"], "image": %b}'
        % (json.dumps(ASK).encode(), nested(990)),
    ),
    "field_no_address": ({**said("Hi", "Hello"), "url": "http://[a.jpg"},),
    "output_00000001": (record(dialogue("Hi", "Hello")),),
    "system": (record([{"role": "system", "content": "Be."}, *ASK]), {".jpg": JPEG}),
}


def create(root: Path, key: str, of_json: Any, others: Files = MappingProxyType({})) -> None:
    for suffix, content in {".json": of_json, **others}.items():
        path = Path(os.path.normpath(f"{root / key}{suffix}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_json(path, content)


def test_outcomes(tmp_path: Path) -> None:
    """Every case in one folder, measured at once."""
    root = tmp_path / "data"
    (tmp_path / "data_secret").mkdir()
    (root / "image_is_folder").mkdir(parents=True)
    (tmp_path / "outside.json").write_text('{"caption": "secret"}')
    for name in ("outside.jpg", "data_secret/a.jpg"):
        (tmp_path / name).write_bytes(JPEG)
    for key, case in {**{key: case for key, (_, *case) in BAD.items()}, **GOOD}.items():
        create(root, key, *case)
    source = {"format": "pairs", "path": str(root), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model={"max_image_pixels": 4_000_000})
    expected = {**{key: reason for key, (reason, *_) in BAD.items()}, **dict.fromkeys(GOOD, "ok")}
    assert outcomes(run) == expected


def test_captioning_takes_one_caption(tmp_path: Path) -> None:
    for key, captions in {"one": ["a"], "two": ["a", "b"], "none": []}.items():
        create(tmp_path / "data", key, {"captions": captions}, {".jpg": JPEG})
    create(tmp_path / "data", "asked", record(), {".jpg": JPEG})
    found = {"one": "ok", "two": "bad_record", "none": "bad_record"}
    assert outcomes(make_run(tmp_path / "data", tmp_path / "out")) == found | {
        "asked": "lost_prompt"
    }
    source = {"format": "pairs", "path": str(tmp_path / "data"), "task": "captioning"}
    asked = make_run({**source, "ignore_prompts": True}, tmp_path / "all")
    assert outcomes(asked) == found | {"asked": "ok"}


def test_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    name = os.path.join(os.fsencode(root), b"caf\xe9")
    try:
        for suffix, content in ((b".json", b'{"caption": "a"}'), (b".jpg", JPEG)):
            with open(name + suffix, "wb") as file:
                file.write(content)
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    assert outcomes(make_run(root, tmp_path / "out")) == {r"caf\xe9": "bad_record"}


def test_json_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "MAX_JSON_BYTES", 1000)
    create(tmp_path / "data", "small", {"caption": "a"}, {".jpg": JPEG})
    create(tmp_path / "data", "large", {"caption": "a" * 1000}, {".jpg": JPEG})
    results = outcomes(make_run(tmp_path / "data", tmp_path / "out"))
    assert results == {"small": "ok", "large": "bad_record"}


def test_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_JSON_BYTES", 1000)
    good = json.dumps(said("Hi", "Hello")).encode()
    lines = [
        good,  # 1
        b"",
        b"{broken",  # 3
        b"   ",
        b'["no object"]',  # 5
        json.dumps(said("Hi", "a" * 2500)).encode(),  # 6
        good.replace(b"{", b'{"id": "named", ', 1),
        good.replace(b"{", b'{"id": 17, ', 1),
        good.replace(b"{", b'{"id": null, ', 1) + b"\r",  # 9
        json.dumps(record(id="no image", image="nowhere.jpg")).encode(),
        good[:-10],  # 11: cut off, without a line end
    ]
    path = tmp_path / "data" / "chat.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\n".join(lines))
    source = {"format": "jsonl", "path": str(path), "task": "bmr"}
    assert outcomes(make_run(source, tmp_path / "out", engine={"samples_per_part": 2})) == {
        "chat:1": "ok",
        "chat:3": "bad_json",
        "chat:5": "bad_record",
        "chat:6": "bad_record",
        "named": "ok",
        "17": "ok",
        "chat:9": "ok",
        "no image": "missing_image",
        "chat:11": "bad_json",
    }
