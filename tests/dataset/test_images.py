"""Images of rows: their forms, their bounds, and errors that name the place."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from areal.conversation import ConversationError
from areal.dataset import get_custom_dataset
from areal.dataset.files import BadData
from areal.dataset.images import MAX_IMAGE_BYTES, BadImage, check, decoded, images_key, located, row_images, shortened
from areal.dataset.vision import load_processor, with_places
from areal.errors import UsageFault
from tests.vision import MODEL, drawing, in_base64, question

RED = drawing("red")
URL = f"data:image/png;base64,{in_base64(RED)}"


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose head has this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def pillow(mode: str, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (4, 2)).save(buffer, form, **options)
    return buffer.getvalue()


def animation() -> bytes:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def test_image_forms_give_equal_bytes(tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    forms = [URL, str(path), RED, {"bytes": RED, "path": "gone.png"}, {"bytes": None, "path": str(path)}]
    assert set(row_images({"images": forms})) == {RED}
    (made,) = row_images({"images": [Image.open(path)]})
    assert decoded(made, "").tobytes() == decoded(RED, "").tobytes()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "HSV", "RGBX"])
def test_non_rgb_pillow_image_is_encoded_as_rgb(mode: str) -> None:
    image = Image.new("RGB", (4, 2), "red").convert(mode)
    (made,) = row_images({"images": [image]})
    assert decoded(made, "").tobytes() == image.convert("RGB").tobytes()


def test_pillow_image_is_rotated_like_its_file() -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    photo = pillow("RGB", "JPEG", exif=turned)
    (made,) = row_images({"images": [Image.open(io.BytesIO(photo))]})
    assert decoded(made, "").size == decoded(photo, "").size == (2, 4)


def test_multi_picture_photo_uses_first_picture() -> None:
    photo, preview = Image.new("RGB", (8, 4), (255, 0, 0)), Image.new("RGB", (4, 2), (0, 0, 255))
    buffer = io.BytesIO()
    photo.save(buffer, "MPO", save_all=True, append_images=[preview])
    check(buffer.getvalue(), "images[0]")
    assert decoded(buffer.getvalue(), "images[0]").size == (8, 4)


def test_malformed_exif_is_an_error_with_its_place() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x011A], exif[0x0131] = 6, 72.0, "x"  # its orientation, resolution and software
    buffer = io.BytesIO()
    Image.new("RGB", (8, 4)).save(buffer, "JPEG", exif=exif)
    data = bytearray(buffer.getvalue())
    data[data.index(b"Exif\0\0") + 6 + 23] = 1  # the resolution is of the type of a byte
    with pytest.raises(BadImage, match=r"^images\[0\] cannot be decoded"):
        decoded(bytes(data), "images[0]")


def test_image_path_is_resolved_in_every_form(tmp_path: Path) -> None:
    given = ["a.png", "~/b.png", {"bytes": None, "path": "c.png"}, {"bytes": b"x", "path": "d.png"}]
    home = str(Path("~/b.png").expanduser())
    assert located(given, tmp_path) == [str(tmp_path / "a.png"), home, str(tmp_path / "c.png"), given[3]]


def test_image_key_depends_on_bytes_and_order() -> None:
    blue = drawing("blue")
    keys = [images_key(each) for each in ([RED], [blue], [RED, blue], [blue, RED], [RED + blue])]
    assert len(set(keys)) == 5 and all(0 < key < 2**63 for key in keys)
    assert images_key([]) == 0 and images_key([RED]) == images_key((RED,))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("https://example.org/a.png", "is https://example.org/a.png: images are not fetched"),
        ("http://127.0.0.1/a.png", "images are not fetched"),
        ("gone.png", "cannot be read: "),
        ("a\0.png", "cannot be read: "),
        (in_base64(bytes(300)), "AAA...: File name too long"),
        ("data:image/png,abc", "must be a data: URL in base64"),
        ("data:image/png;base64,%%%", "is not in base64"),
        (7, "must be a file, a data: URL or an image, not a int"),
        (b"GIF89a", "cannot be decoded (PNG, JPEG, WEBP): its first bytes are of none of these formats"),
        (RED[:40], "cannot be decoded"),
        (bomb(100_000, 100_000), "cannot be decoded"),  # refused by Pillow itself
        (bomb(6000, 6000), "has 6000 x 6000 pixels, and 33554432 are the most"),
        (b"\0" * (MAX_IMAGE_BYTES + 1), "has more than 8 MiB"),
        (animation(), "has 2 frames"),
        (pillow("I;16", "PNG"), "has pixels of 16 bits"),
        (Image.new("F", (4, 4)), "cannot be encoded as PNG"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else type(value).__name__,
)
def test_bad_image_is_one_error_with_its_place(image: Any, message: str) -> None:
    with pytest.raises(BadImage) as refused:
        for each in row_images({"images": [RED, image]}):
            decoded(each, "images[1]")
    assert "images[1]" in refused.value.message and message in refused.value.message


def write(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_image_rows_are_read_for_vision_models(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    path = write(
        tmp_path, {"image": "red.png", "question": "What?", "answer": "red"}, {"question": "Why?", "answer": ""}
    )
    rows = get_custom_dataset(path=path, processor=True)
    assert rows[0]["images"] == [str(tmp_path / "red.png")] and "image" not in rows[0]
    assert rows[0]["messages"] == question("What?") and "images" not in rows[1]


@pytest.mark.parametrize("type", ["rl", "sft"])
def test_image_rows_are_refused_for_text_models(tmp_path: Path, type: str) -> None:
    path = write(tmp_path, {"images": [URL], "question": "What?", "answer": "red"})
    with pytest.raises(BadData, match=r"rows\.jsonl:1: the row has images: here prompts are text; images are seen by"):
        get_custom_dataset(path=path, type=type, tokenizer=load_processor(str(MODEL)).tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": [URL, "gone.png"]}, r"rows.jsonl:2: images\[1\] cannot be read: .*gone.png: No such file"),
        ({"images": [URL] * 17}, "rows.jsonl:2: images has 17 images, and a prompt may have 16"),
        ({"images": [URL], "image": URL}, "rows.jsonl:2: the row has image and images"),
        ({"images": [URL], "audio": "a.wav"}, "rows.jsonl:2: the row has audio: only images are supported"),
    ],
)
def test_invalid_image_row_is_named_on_load(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path, {"images": [URL], "question": "x"}, {**row, "question": "x"})
    with pytest.raises(BadData, match=message):
        get_custom_dataset(path=path, processor=True)


def test_prompt_has_placeholders_at_message_images() -> None:
    processor = load_processor(str(MODEL))
    image = {"type": "image"}
    parts = [{"type": "text", "text": "What"}, image, {"type": "text", "text": " color"}]
    first = processor.prompt(question("What color"), [RED])
    middle = processor.prompt([{"role": "user", "content": parts}], [RED])
    assert sorted(first) == sorted(middle) and first != middle
    assert processor.prompt(question("What<image> color"), [RED]) == middle
    assert first.count(processor.token_id) == processor.pixels([RED]).placeholders == 4


def test_processor_matches_transformers() -> None:
    from transformers import AutoProcessor

    plain = AutoProcessor.from_pretrained(MODEL)
    text = f"<bos><image>{question()[0]['content']}<end_of_utterance>"
    wanted = plain(text=[text], images=[[decoded(RED, "")]], return_tensors="pt", add_special_tokens=False)
    processor = load_processor(str(MODEL))
    assert processor.prompt(question(), [RED]) == wanted["input_ids"][0].tolist()
    assert processor.pixels([RED]).tensors["pixel_values"].equal(wanted["pixel_values"])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": [{"type": "image"}] * 2}], "have 2 image parts, but the row has 1"),
        ([{"role": "user", "content": [{"type": "text", "text": "<image>"}]}], "has the text <image>"),
        ([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}], "has a part of type 'image_url'"),
        ([{"role": "system", "content": "x"}], "no user message to put them in"),
        ([], "must be a list with at least one message"),
    ],
)
def test_messages_not_matching_their_images_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        with_places(messages, 1, "<image>")


def test_malformed_message_beside_an_image_is_named() -> None:
    with pytest.raises((UsageFault, ConversationError), match=r"messages\[0\]"):
        load_processor(str(MODEL)).prompt([{"content": "x"}], [RED])


def test_images_are_abbreviated_in_log() -> None:
    assert shortened("red.png") == "red.png"
    assert len(shortened(URL)) < 60 and len(shortened(RED)) < 60 and len(shortened({"bytes": RED})) < 60
