"""Decoding of image bytes from a client to RGB pixels, with limits checked before large allocations."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from io import BytesIO

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

# Image.open() finds these two plugins only by importing all plugins.
from PIL import TiffImagePlugin as _tiff  # noqa: F401
from PIL import WebPImagePlugin as _webp  # noqa: F401

from mmserve.config import MediaConfig
from mmserve.encode.watch import UNWATCHED, Watch
from mmserve.errors import InvalidArgument

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

#: Exceptions of pillow's plugins on damaged files.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    EOFError,
    MemoryError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
OUT_OF_MEMORY = "needs more memory to decode than a decoder may take; send it smaller"
#: Other compressions are rare, and libtiff's fax decoder prints a line to stderr for every damaged row and continues.
_TIFF_COMPRESSIONS = ("raw", "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits", "jpeg")
_PILLOW = re.compile(r"PIL\.")
_ORIENTATION_TAG, _BITS_TAG, _PHOTOMETRIC_TAG = 0x0112, 0x0102, 0x0106
#: Brands of ``ftyp`` boxes of the picture formats HEIC and AVIF.
STILL_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"avif", b"avis")
#: Format by file signature, for error messages about unsupported files.
_SIGNATURES = (
    (b"\x89PNG", "a damaged PNG file"),
    (b"\xff\xd8\xff", "a damaged JPEG file"),
    (b"II*\x00", "a TIFF file that is damaged or of a rare kind"),
    (b"MM\x00*", "a TIFF file that is damaged or of a rare kind"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"8BPS", "a Photoshop file"),
    (b"%PDF-", "a PDF"),
    (b"PK\x03\x04", "an archive"),
    (b"\x1f\x8b", "an archive"),
    (b"7z\xbc\xaf", "an archive"),
    (b"Rar!", "an archive"),
)
#: Operation that makes the picture upright, by EXIF orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, limits: MediaConfig, *, field: str = "image", watch: Watch = UNWATCHED) -> Image.Image:
    """The picture in a PNG, JPEG, WebP, GIF, BMP or TIFF file, upright, in mode RGB, without metadata.

    The first frame of an animation; transparency over white; 12- and 16-bit grey scaled to 8 bits; colour profiles
    ignored.

    Raises ``InvalidArgument`` with ``field`` if the file is empty, of another format, damaged or truncated, or beyond
    ``limits`` (bytes, pixels, side); sizes are read from the header before pixels are decoded.
    """
    _silence_pillow()
    if not data:
        raise InvalidArgument.of(field, "is empty (0 bytes)")
    if len(data) > limits.max_item_bytes:
        raise InvalidArgument.of(field, too_large(len(data), limits))
    check_size(_early_size(data), limits, field)
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidArgument.of(field, f"is {_looks_like(data)}, not a readable {', '.join(FORMATS)} image") from None
    except Image.DecompressionBombError:
        limit = min(limits.max_pixels, 2 * (Image.MAX_IMAGE_PIXELS or limits.max_pixels))
        setting = named("max_pixels") if limit == limits.max_pixels else "(a limit of Pillow)"
        raise InvalidArgument.of(field, f"has too many pixels; the limit is {limit} in all {setting}") from None
    except _DAMAGE as error:
        raise InvalidArgument.of(field, f"is a damaged image: {error}") from None
    check_size(image.size, limits, field)
    if image.mode in ("I", "F") and image.format != "PNG":
        raise InvalidArgument.of(field, "has pixels of 32 bits a channel; send 8 or 16")
    if image.format == "TIFF" and image.info.get("compression") not in _TIFF_COMPRESSIONS:
        raise InvalidArgument.of(field, f"is a TIFF compressed as {image.info.get('compression')!r}; send PNG instead")
    if image.format == "TIFF" and not _whole(image):
        raise InvalidArgument.of(field, "is a damaged or cut off TIFF image: parts of it are missing")
    if image.format == "PNG":
        _scale_transparency(image, data)
    watch.reserve(image.width * image.height)
    try:
        image.load()
        upright = _upright(_rgb(image), _orientation(image))
    except MemoryError:
        raise InvalidArgument.of(field, OUT_OF_MEMORY) from None
    except _DAMAGE as error:
        raise InvalidArgument.of(field, f"is a damaged or cut off {image.format} image: {error}") from None
    check_size(upright.size, limits, field)
    upright.info = {}
    watch.check()
    return upright


def too_large(size: int, limits: MediaConfig) -> str:
    """The error text for a file of ``size`` bytes."""
    return f"has {size} bytes; the limit is {limits.max_item_bytes} {named('max_item_bytes')}"


def _silence_pillow() -> None:
    """Suppress pillow's warnings about unusual files: relevant problems are raised as errors.

    Adding one filter is thread-safe, unlike ``warnings.catch_warnings``.
    """
    if not warnings.filters or warnings.filters[0][3] != _PILLOW:
        warnings.filterwarnings("ignore", module=_PILLOW.pattern)


def _early_size(data: bytes) -> tuple[int, int] | None:
    """Width and height from a GIF or WebP header: their plugins allocate the canvas when a file is opened."""
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        width, height = struct.unpack_from("<HH", data, 6)
        return width, height
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def named(setting: str) -> str:
    """The part of an error text that names the server's setting."""
    return f"([media] {setting} of the server)"


def check_size(size: tuple[int, int] | None, limits: MediaConfig, field: str) -> None:
    """Raise ``InvalidArgument`` if ``size`` (width and height in pixels, None = unknown) exceeds the limits."""
    if size is None:
        return
    width, height = size
    if width < 1 or height < 1:
        raise InvalidArgument.of(field, f"has no pixels ({width} x {height})")
    if max(size) > limits.max_side:
        raise InvalidArgument.of(
            field, f"is {width} x {height} pixels; the limit is {limits.max_side} a side {named('max_side')}"
        )
    if width * height > limits.max_pixels:
        why = f"the limit is {limits.max_pixels} in all {named('max_pixels')}"
        raise InvalidArgument.of(field, f"has {width} x {height} pixels; {why}")


def _whole(image: ImageFile.ImageFile) -> bool:
    """Whether the strips or tiles listed in a TIFF file cover the picture; pillow fills missing areas with black."""
    boxes = (extents or (0, 0, *image.size) for _decoder, extents, _offset, _arguments in image.tile)
    return sum((right - left) * (bottom - top) for left, top, right, bottom in boxes) >= image.width * image.height


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I"):
        return _from_deep_grey(image)
    if image.has_transparency_data:
        layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        canvas = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        canvas.alpha_composite(layer)
        return canvas.convert("RGB")
    return image.convert("RGB")


def _scale_transparency(image: Image.Image, data: bytes) -> None:
    """Scale the transparent grey or colour of a PNG file to the bit depth of the decoded pixels: pillow converts pixels
    of less than 8 bits, and 16-bit channels of colours, to 8 bits, but not this value."""
    bits, colour = data[24], image.info.get("transparency")  # from the header, the first chunk
    if isinstance(colour, int) and bits in (1, 2, 4) and image.mode != "P":
        most = (1 << bits) - 1
        image.info["transparency"] = (colour & most) * 255 // most
    elif isinstance(colour, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in colour)


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """16-bit grey scaled to 8 bits; pillow ignores the number of used bits in TIFF files, and whether 0 is white."""
    grey = np.asarray(image).astype(np.uint32)
    tags = getattr(image, "tag_v2", {})
    white: int = (1 << tags.get(_BITS_TAG, (16,))[0]) - 1
    if tags.get(_PHOTOMETRIC_TAG) == 0:
        grey = white - grey
    if isinstance(through := image.info.get("transparency"), int):
        grey[grey == through] = white
    return Image.fromarray(((grey * 255 + white // 2) // white).astype(np.uint8)).convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; 1 if there is none or it cannot be read, as damaged metadata does not make a picture
    invalid."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DAMAGE:
        return 1
    return value if isinstance(value, int) else 1


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    operation = _UPRIGHT.get(orientation)
    return image if operation is None else image.transpose(operation)


def _looks_like(data: bytes) -> str:
    head = data[:512]
    if head[4:8] == b"ftyp" and head[8:12] in STILL_BRANDS:
        return "a HEIC or AVIF picture"
    if head[4:8] == b"ftyp" or head[:4] in (b"\x1aE\xdf\xa3", b"OggS", b"FLV\x01") or head[8:12] == b"AVI ":
        return "a video or another container"
    known = next((kind for start, kind in _SIGNATURES if head.startswith(start)), None)
    if known is not None:
        return known
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:4].lower() in (b"<svg", b"<?xm"):
        return "SVG or XML"
    if b"\x00" not in head:
        try:
            head.decode("utf-8")
        except UnicodeDecodeError as error:
            return "text" if error.start >= len(head) - 3 and error.start else "a file of unknown kind"
        return "text"
    return "a file of unknown kind"
