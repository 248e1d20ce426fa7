"""Images of rows and of requests, encoded as PNG, JPEG or WebP, within bounds. They are never fetched from a network.

A row has a list ``images`` of paths, ``data:`` URLs, bytes, the ``{"bytes", "path"}`` of the package ``datasets``, or
images of Pillow. In memory, in requests and in training an image is its encoded bytes, which ``images_key`` identifies.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.installation import install_command
from areal.wire.sampling import MAX_IMAGES

MAX_IMAGE_BYTES = 8 << 20  # of one image, encoded
MAX_PIXELS = 1 << 25  # of one image
_FORMATS = ("PNG", "JPEG", "WEBP")
_COLOURS = ("CMYK", "YCbCr", "LAB", "HSV", "RGBX")  # that PNG does not have
_LONGEST_NAME, _LONGEST_PATH = 80, 255


class BadImage(UsageFault):
    """An image that is missing, broken or above a bound. The message begins with its place: ``images[0]``."""


def row_images(row: Mapping[str, object]) -> tuple[bytes, ...]:
    """Return the encoded images of a row's column ``images``. Raises BadImage."""
    given = row.get("images")
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise BadImage(f"images must be a list, not a {type(given).__name__}")
    check_count(len(given))
    return tuple(encoded(each, f"images[{number}]") for number, each in enumerate(given))


def check_count(count: int) -> None:
    """Raise BadImage."""
    if count > MAX_IMAGES:
        raise BadImage(f"images has {count} images, and a prompt may have {MAX_IMAGES}")


def located(images: Any, folder: Path | None) -> Any:
    """Return the column ``images`` of a row, its relative paths resolved against ``folder``."""
    given = list(images) if isinstance(images, list | tuple) else [images]
    return [_located(each, folder) for each in given]


def _located(image: Any, folder: Path | None) -> Any:
    if isinstance(image, Mapping) and image.get("bytes") is None:
        image = image.get("path")
    return str(folder / Path(image).expanduser()) if folder is not None and is_path(image) else image


def is_path(value: object) -> bool:
    return isinstance(value, str) and not value.startswith("data:") and "://" not in value


def encoded(value: Any, place: str) -> bytes:
    """Return the bytes of an image in any of its forms. Raises BadImage."""
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        head, _, body = value.partition(",")
        if not head.endswith(";base64"):
            raise BadImage(f"{place} must be a data: URL in base64")
        return from_base64(body, place)
    if isinstance(value, str) and not is_path(value):
        raise BadImage(f"{place} is {value[:_LONGEST_NAME]}: images are not fetched; give a file or a data: URL")
    if isinstance(value, str):
        return _bounded(_read(Path(value).expanduser(), place), place)
    if isinstance(value, bytes):
        return _bounded(value, place)
    if hasattr(value, "save") and hasattr(value, "getexif"):
        return _bounded(_as_png(value, place), place)
    raise BadImage(f"{place} must be a file, a data: URL or an image, not a {type(value).__name__}")


def _as_png(image: Any, place: str) -> bytes:
    """Return an image of Pillow, turned as its EXIF data says, which PNG does not keep."""
    from PIL import ImageOps

    buffer = io.BytesIO()
    try:
        turned = ImageOps.exif_transpose(image)
        (turned.convert("RGB") if turned.mode in _COLOURS else turned).save(buffer, "PNG")
    except (OSError, ValueError, SyntaxError, struct.error) as error:
        raise BadImage(f"{place} cannot be encoded as PNG: {error}") from error
    return buffer.getvalue()


def from_base64(text: str, place: str) -> bytes:
    """Raise BadImage."""
    if len(text) > 4 * MAX_IMAGE_BYTES // 3 + 4:
        raise _too_large(place)
    try:
        return _bounded(base64.b64decode(text, validate=True), place)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"{place} is not in base64: {error}") from error


def _read(path: Path, place: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise _unread(path, place, error) from error


def _unread(path: Path, place: str, error: Exception) -> BadImage:
    name = str(path)  # or a base64 text without its head
    shown = name if len(name) <= _LONGEST_PATH else f"{name[:_LONGEST_NAME]}..."
    return BadImage(f"{place} cannot be read: {shown}: {getattr(error, 'strerror', None) or error}")


def _bounded(data: bytes, place: str) -> bytes:
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(place)
    return data


def _too_large(place: str) -> BadImage:
    return BadImage(f"{place} has more than {MAX_IMAGE_BYTES >> 20} MiB")


def decoded(data: bytes, place: str) -> Any:
    """Return Pillow's image, turned as EXIF says. Raises BadImage before it takes memory for too many pixels."""
    with _opened(io.BytesIO(data), place) as image:
        from PIL import ImageOps

        image.load()
        return ImageOps.exif_transpose(image)


def check(value: Any, place: str) -> None:
    """Check an image in any of its forms; of a file its head alone is read. Raises BadImage."""
    if not is_path(value):
        source: Any = io.BytesIO(encoded(value, place))
    else:
        source = Path(value).expanduser()
        try:
            size = source.stat().st_size
        except (OSError, ValueError) as error:
            raise _unread(source, place, error) from error
        if size > MAX_IMAGE_BYTES:
            raise _too_large(place)
    with _opened(source, place):
        pass


@contextlib.contextmanager
def _opened(source: Any, place: str) -> Iterator[Any]:
    """Yield the image within its bounds, not decoded yet. Its errors are BadImage."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise UsageFault("images need the package pillow", hint=install_command("vision")) from error
    try:
        with Image.open(source, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadImage(f"{place} has {width} x {height} pixels, and {MAX_PIXELS} are the most")
            if (frames := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # a photo and its previews
                raise BadImage(f"{place} has {frames} frames: an animation is not one image")
            if image.mode.startswith(("I", "F")):  # as RGB, all above 255 would be white
                raise BadImage(f"{place} has pixels of 16 bits: save it with 8 bits")
            yield image
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        unknown = isinstance(error, UnidentifiedImageError)  # its message is the address of a buffer
        why = "its first bytes are of none of these formats" if unknown else error
        raise BadImage(f"{place} cannot be decoded ({', '.join(_FORMATS)}): {why}") from error


def images_key(images: Sequence[bytes]) -> int:
    """Return a number from 1 below 2**63 that identifies these images in this order; 0 without images."""
    if not images:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for each in images:
        digest.update(hashlib.blake2b(each, digest_size=32).digest())
    return int.from_bytes(digest.digest()) >> 1 or 1


def shortened(value: Any) -> Any:
    """Return an image of a row for a log or a journal: a path as it is, else its kind and size."""
    if is_path(value):
        return value
    if isinstance(value, str):
        return f"{value[:32]}... ({len(value)} characters)"
    if isinstance(value, bytes):
        return f"image of {len(value)} bytes"
    if isinstance(value, Mapping):
        return shortened(value["bytes"] if value.get("bytes") is not None else value.get("path"))
    return f"image of {type(value).__name__}"
