"""Each kind of bad, and of merely unusual, input: one real run of measure over all."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from PIL import features

from offline_packing.sources.roots import roots
from tests.helpers.datasets import dialogue, image_bytes, make_run, outcomes, png, write_json

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


BESIDE = {".jpg": JPEG}
#: By the reason: what stands in the JSON, or this and other files.
BAD: dict[str, dict[str, Any]] = {
    "bad_json": {
        "json_broken": b'{"messages": [',
        "json_empty": b"",
        "json_not_utf8": '{"caption": "é"}'.encode("latin-1"),
        "json_nan": b'{"caption": NaN}',
        "json_lone_surrogate": rb'{"caption": "\ud800"}',
        "json_too_deep": nested(100_000),
        "json_dangling_link": link_to("nowhere.json"),
    },
    "path_outside_root": {
        "json_link_outside": link_to("../outside.json"),
        "path_parent": record(images=["../outside.jpg"]),
        "path_absolute": record(images=["/etc/hostname"]),
        "path_sibling": record(images=["../data_secret/a.jpg"]),
        "path_link": (record(), {".jpg": link_to("../outside.jpg")}),
        "path_link_folder": (record(images=["linked/outside.jpg"]), {"/../linked": link_to("..")}),
    },
    "bad_record": {
        "json_list": [1, 2],
        "json_text": "hello",
        "record_empty": {},
        "messages_text": record("hello", images=[]),
        "messages_empty": record([], images=[]),
        "message_no_content": record([{"role": "user"}], images=[]),
        "message_content_list": record(
            [{"role": "user", "content": [{"type": "text"}]}], images=[]
        ),
        "images_numbers": record(images=[7]),
        "no_question": {"answer": "Blue.", "images": []},
        "two_questions_one_answer": {"question": ["a", "b"], "answer": "Blue.", "images": []},
        "answer_object": {"question": "a", "answer": [7, {}], "images": []},
    },
    "missing_image": {
        "video_missing": record(images=[], videos=["a.mp4"]),
        "image_missing": record(images=["nowhere.jpg"]),
        "image_not_beside": record(),
        "image_other_format": (record(), {".heic": JPEG}),
        "image_is_folder": record(images=["image_is_folder"]),
        "image_is_pipe": (record(), {".jpg": lambda path: os.mkfifo(path)}),
        "image_name_empty": record(images=[""]),
        "image_name_nul": record(images=["a\0.jpg"]),
        "image_name_too_long": record(images=["a" * 300 + ".jpg"]),
        "image_url": record(images=["https://example.org/a.jpg"]),
        "image_link_loop": (record(), {".jpg": link_to("image_link_loop.jpg")}),
    },
    "bad_roles": {
        "roles_assistant_first": spoken("assistant", "user"),
        "roles_two_users": spoken("user", "user", "assistant"),
        "roles_ends_with_user": spoken("user", "assistant", "user"),
        "roles_system_only": spoken("system"),
        "roles_system_inside": spoken("user", "assistant", "system"),
        "roles_unknown": spoken("narrator", "critic"),
        "roles_system_assistant": spoken("system", "assistant"),
        "roles_two_assistants": spoken("user", "assistant", "assistant"),
        "roles_unknown_between": spoken("user", "critic", "assistant"),
        "roles_user_tool": spoken("user", "tool"),
        "roles_user": spoken("user"),
    },
    "empty_answer": {
        "answer_empty": said("Hello", ""),
        "answer_blank": said("Hello", " \n\t"),
        "second_answer_empty": said("Hello", "Hi", "And?", ""),
    },
    "image_count_mismatch": {
        "count_too_many_tags": (record(dialogue("<image><image>", "x")), BESIDE),
        "count_too_many_images": (record(images=["a.jpg", "b.jpg"]), {"/a.jpg": JPEG}),
        "count_tag_without_image": record(images=[]),
    },
    "ambiguous_image": {"image_ambiguous": (record(), {".jpg": JPEG, ".png": JPEG})},
    "bad_image": {"image_zero_bytes": (record(), {".jpg": b""})},
    "truncated_image": {"image_truncated_jpeg": (record(), {".jpg": JPEG[:-40]})},
    "image_too_large": {
        "image_bomb": (record(), {".png": png(60_000, 60_000, b"", 2)}),
        "image_large": (record(), {".png": png(3_000, 3_000, b"", 2)}),
    },
    "too_costly": {
        "image_fills": (record(), {".jpg": b"\xff\xd8" + b"\xff" * 40_000}),
        "image_names": record(dialogue("What?", "x"), images=["a.jpg"] * 5000),
        "messages_many": said(*["Hi", "Hello"] * 25_001),
        "text_long": said("Hi", "a" * 2_000_001),
        "text_white_space": said("a" + " " * 1_000_000 + "x", "b"),
        "text_marks": said("Hi", "a" + "\u0301\u0323" * 3000),
        "json_values": b'{"a": [' + b"{}," * 1_100_000 + b"1]}",
    },
    "unexpected_error": {
        "calls_nested": record([ASK[0], call("f", json.loads(nested(300)))], images=[]),
        "answer_long_integer": {"question": "a", "answer": 10**22, "images": []},
        "call_long_integer": record(
            [ASK[0], {"role": "tool_call", "content": f'{{"name": "f", "arguments": [{10**22}]}}'}]
        ),
    },
    "aspect_ratio": {
        "image_narrow": (record(), {".jpg": image_bytes(8, 1700)}),
        "image_wide": (record(), {".jpg": image_bytes(1700, 8)}),
    },
}

GOOD: dict[str, tuple[Any, ...]] = {
    "name.with.dots": (record(), BESIDE),
    "name with spaces": (record(), BESIDE),
    "name:with:colons": (record(), BESIDE),
    "name_emoji_🙂": (record(), BESIDE),
    "名字": (record(), BESIDE),
    "name'with\"quotes": (record(), BESIDE),
    "-rf": (record(), BESIDE),
    "special_tokens": (said("<|im_end|><|im_start|>system", "<|image_pad|><|vision_start|>"),),
    "image_tag_in_answer": (said("What marks an image?", "<image> does."),),
    "byte_order_mark": (b"\xef\xbb\xbf" + json.dumps(said("Hi", "Hello")).encode(),),
    "crlf": (json.dumps(said("Hi\r\nyou", "Hello"), indent=2).encode(),),
    "images_null": (record(images=None), BESIDE),
    "long_integer_beside": ({**said("Hi", "Hello"), "hash": -(10**22)},),
    "image_one": (record(image="image_one/a.jpg"), {"/a.jpg": JPEG}),
    "image_no_tag": (record(dialogue("What?", "A square.")), BESIDE),
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
    "question_answer": ({"question": "<image>Colour?", "answer": "Blue."}, BESIDE),
    "context_answers": ({"context": "Colour?", "answers": ["Blue."]}, BESIDE),
    "turns_as_lists": ({"prompt": ["a", "b"], "captions": ["c", {"content": "d"}], "images": []},),
    "field_nested": (
        b'{"messages": %b, "images": ["image_one/a.jpg"], "image": %b}'
        % (json.dumps(ASK).encode(), nested(990)),
    ),
    "field_no_address": ({**said("Hi", "Hello"), "url": "http://[a.jpg"},),
    "output_00000001": (record(dialogue("Hi", "Hello")),),
    "system": (record([{"role": "system", "content": "Be."}, *ASK]), BESIDE),
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
    for key, case in [*GOOD.items(), *(one for cases in BAD.values() for one in cases.items())]:
        create(root, key, *(case if isinstance(case, tuple) else (case,)))
    source = {"format": "pairs", "path": str(root), "task": "bmr"}
    run = make_run(source, tmp_path / "out", model={"max_image_pixels": 4_000_000})
    expected = {key: reason for reason, cases in BAD.items() for key in cases}
    assert outcomes(run) == expected | dict.fromkeys(GOOD, "ok")


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
    monkeypatch.setattr(roots, "MAX_JSON_BYTES", 1000)
    create(tmp_path / "data", "small", {"caption": "a"}, {".jpg": JPEG})
    create(tmp_path / "data", "large", {"caption": "a" * 1000}, {".jpg": JPEG})
    results = outcomes(make_run(tmp_path / "data", tmp_path / "out"))
    assert results == {"small": "ok", "large": "bad_record"}
