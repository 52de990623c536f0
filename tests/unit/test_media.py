"""Images of every accepted kind become upright RGB; everything else is refused with a reason."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from mmserve.config import MediaConfig
from mmserve.encode.media import FORMATS, decode_image
from mmserve.errors import InvalidArgument

FIELD = "messages[0].parts[1].image"
LIMITS = MediaConfig()


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(width: int = 40, height: int = 24) -> Image.Image:
    """Noise (so that it does not compress away), its corners in four colours."""
    array = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    array[:8, :8], array[:8, -8:], array[-8:, :8], array[-8:, -8:] = (255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)
    return Image.fromarray(array)


def refused(data: bytes, limits: MediaConfig = LIMITS) -> str:
    with pytest.raises(InvalidArgument) as caught:
        decode_image(data, limits, field=FIELD)
    (violation,) = caught.value.violations
    assert violation.field == FIELD
    return violation.description


@pytest.mark.parametrize("form", FORMATS)
def test_every_format(form: str) -> None:
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(form, {})
    source = picture()
    if form == "GIF":
        source = source.quantize(256)
    result = decode_image(encoded(source, form, **options), LIMITS)
    assert type(result) is Image.Image
    assert (result.mode, result.size, result.info) == ("RGB", (40, 24), {})
    difference = np.abs(np.asarray(result, int) - np.asarray(source.convert("RGB"), int))
    assert difference.mean() < (8 if form == "JPEG" else 1e-9)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_orientation(form: str, orientation: int) -> None:
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.transpose(Image.Transpose.ROTATE_180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.transpose(Image.Transpose.TRANSPOSE),
        6: lambda i: i.transpose(Image.Transpose.ROTATE_90),
        7: lambda i: i.transpose(Image.Transpose.TRANSVERSE),
        8: lambda i: i.transpose(Image.Transpose.ROTATE_270),
    }[orientation](picture())
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(form, {})
    result = decode_image(encoded(stored, form, exif=exif, **options), LIMITS)
    assert result.size == (40, 24)
    assert np.abs(np.asarray(result, int) - np.asarray(picture(), int)).mean() < 8


def test_transparency_is_white() -> None:
    layer = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    layer.putpixel((1, 0), (0, 0, 0, 0))
    for data in (encoded(layer), encoded(layer, "WEBP", lossless=True), encoded(layer, "TIFF")):
        assert np.asarray(decode_image(data, LIMITS)).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    half = encoded(Image.new("LA", (1, 1), (0, 128)))
    assert np.asarray(decode_image(half, LIMITS)).tolist() == [[[127, 127, 127]]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    for data in (encoded(palette, transparency=0), encoded(palette, transparency=b"\x00\xff")):
        assert np.asarray(decode_image(data, LIMITS)).tolist() == [[[255, 255, 255], [40, 50, 60]]]
    grey = encoded(Image.new("L", (1, 1), 7), transparency=7)
    assert np.asarray(decode_image(grey, LIMITS)).tolist() == [[[255, 255, 255]]]


def test_grey_of_sixteen_bits_is_scaled() -> None:
    levels = np.array([[0, 257, 32_768, 65_535]], dtype=np.uint16)
    for form in ("PNG", "TIFF"):
        result = np.asarray(decode_image(encoded(Image.fromarray(levels), form), LIMITS))
        assert result[0, :, 0].tolist() == [0, 1, 128, 255]
        assert (result == result[..., :1]).all()


def tiff(data: bytes, size: tuple[int, int], *, bits: int = 8, samples: int = 1, **tags: int) -> bytes:
    """A little-endian TIFF of one strip; ``tags`` (``t262=0``) replace its own."""
    width, height = size
    found = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 0, 277: samples, 278: height, 279: len(data)}
    found |= {int(name[1:]): value for name, value in tags.items()}
    start = 8 + 2 + 12 * len(found) + 4
    entries = (
        struct.pack("<HHIHH", tag, 3, 2, bits, bits)
        if tag == 258 and samples == 2
        else struct.pack("<HHII", tag, 4, 1, start if tag == 273 else value)
        for tag, value in sorted(found.items())
    )
    return b"II*\0" + struct.pack("<IH", 8, len(found)) + b"".join(entries) + bytes(4) + data


def test_grey_of_a_tiff_is_as_bright_as_it_says() -> None:
    """Pillow leaves negatives of 16 bits, and 12 bits of 16, as they are."""
    levels = np.array([0, 2570, 32_768, 65_535], dtype="<u2").tobytes()
    for negative, expected in ((False, [0, 10, 128, 255]), (True, [255, 245, 127, 0])):
        result = decode_image(tiff(levels, (4, 1), bits=16, t262=int(not negative)), LIMITS)
        assert np.asarray(result)[0, :, 0].tolist() == expected
    twelve = bytes([0xFF, 0xF0, 0x00, 0x80, 0x0F, 0xFF])  # 4095, 0, 2048, 4095
    assert np.asarray(decode_image(tiff(twelve, (4, 1), bits=12), LIMITS))[0, :, 0].tolist() == [255, 0, 128, 255]


def test_grey_that_is_multiplied_by_its_alpha_already() -> None:
    pixel = bytes([64, 128])
    for kind, expected in ((1, 64 + 127), (2, 32 + 127)):
        result = decode_image(tiff(pixel, (1, 1), samples=2, t338=kind), LIMITS)
        assert np.asarray(result).tolist() == [[[expected] * 3]]


def test_a_tiff_that_lists_too_few_strips_is_refused() -> None:
    """Pillow would leave the rest black."""
    data = bytes([200]) * 32
    assert decode_image(tiff(data, (4, 8)), LIMITS).getextrema() == ((200, 200),) * 3
    assert "parts of it are missing" in refused(tiff(data[:16], (4, 8), t278=4))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes(mode: str) -> None:
    form = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"
    source = Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)
    assert np.asarray(decode_image(encoded(source, form), LIMITS)).min() >= 254
    if mode == "CMYK":
        red = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
        assert decode_image(encoded(red, "JPEG", quality=95), LIMITS).getpixel((4, 4)) == pytest.approx(
            (255, 0, 0), abs=6
        )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_thirty_two_bits_are_refused(mode: str) -> None:
    assert "32 bits" in refused(encoded(Image.new(mode, (4, 4)), "TIFF"))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(form: str) -> None:
    red, blue = Image.new("RGB", (6, 6), (255, 0, 0)), Image.new("RGB", (6, 6), (0, 0, 255))
    data = encoded(
        red, form, save_all=True, append_images=[blue, red], **({"lossless": True} if form == "WEBP" else {})
    )
    assert decode_image(data, LIMITS).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "group4", "group3"])
def test_tiff_compressions(compression: str) -> None:
    fax = compression.startswith("group")
    data = encoded(picture().convert("1") if fax else picture(), "TIFF", compression=compression)
    if fax:
        assert f"compressed as '{compression}'" in refused(data)
    else:
        assert decode_image(data, LIMITS).size == (40, 24)


def test_profile_is_ignored() -> None:
    result = decode_image(encoded(picture(), icc_profile=b"not a profile"), LIMITS)
    assert np.array_equal(np.asarray(result), np.asarray(picture()))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_cut_off_files_are_refused(form: str, share: float) -> None:
    data = encoded(picture(200, 120), form)
    refused(data[: int(len(data) * share)])


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_never_escape(form: str) -> None:
    random = np.random.default_rng(1)
    data = encoded(picture(), form)
    for _ in range(150):
        hurt = bytearray(data)
        for at in random.integers(0, min(len(hurt), 400), 4):
            hurt[at] = random.integers(0, 256)
        try:
            assert decode_image(bytes(hurt), MediaConfig(max_pixels=1_000_000), field=FIELD).mode == "RGB"
        except InvalidArgument as error:
            assert error.violations[0].field == FIELD


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (b"hello, this is no picture", "text"),
        ("größer als nichts".encode(), "text"),
        (b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2mp41", "video"),
        (b"\x1aE\xdf\xa3\x01\x00\x00\x00\x00\x00\x00\x1f", "video"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\xef\xbb\xbf<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "HEIC or AVIF"),
        (b"\x00\x00\x00\x18ftypavif\x00\x00\x00\x00mif1avif", "HEIC or AVIF"),
        (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"PK\x03\x04\x14\x00", "an archive"),
        (b"II*\x00\x08\x00\x00\x00", "a TIFF file that is damaged"),
        (b"%PDF-1.7\n%\xe2\xe3", "PDF"),
        (bytes(range(256)), "unknown kind"),
        (b"\x89PNG\r\n\x1a\n", "not a readable"),
        (b"\xff\xd8\xff", "not a readable"),
        (b"GIF89a\x04\x00\x04\x00", "GIF"),
        (b"P6 2 2 255 ............", "text"),
    ],
)
def test_what_is_no_image(data: bytes, reason: str) -> None:
    assert reason in refused(data)


def test_other_formats_of_pillow_are_refused() -> None:
    for form in ("PPM", "TGA", "ICO", "PCX"):
        assert "not a readable" in refused(encoded(picture(), form))


def test_limits() -> None:
    data = encoded(picture())
    assert "bytes; the limit is 99" in refused(data, MediaConfig(max_item_bytes=99))
    assert "a side" in refused(data, MediaConfig(max_side=39))
    assert "in all" in refused(data, MediaConfig(max_pixels=40 * 24 - 1))
    assert decode_image(data, MediaConfig(max_side=40, max_pixels=40 * 24, max_item_bytes=len(data))).size == (40, 24)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, kind: tuple[int, int], rows: bytes, *chunks: bytes) -> bytes:
    """A PNG of so many bits a channel and colour type (``kind``), with ``chunks`` in front of the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, *kind, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + data + chunk(b"IEND", b"")


def png_claiming(width: int, height: int) -> bytes:
    return png(width, height, (8, 2), bytes(1000))


@pytest.mark.parametrize(
    "data",
    [
        png_claiming(16_000, 16_000),
        png_claiming(2**31 - 1, 2**31 - 1),
        png_claiming(9_500, 9_500),  # pillow warns here, and fails above
        b"GIF89a\xff\xff\xff\xff\x00\x00\x00," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\x00;",
        b"RIFF\x40\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x10\x00\x00\x00\xff\xff\xff\xff\xff\xff" + bytes(30),
        b"RIFF\x40\x00\x00\x00WEBPVP8L\x20\x00\x00\x00\x2f\xff\xff\xff\xff" + bytes(30),
        b"RIFF\x40\x00\x00\x00WEBPVP8 \x20\x00\x00\x00\x00\x00\x00\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(30),
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
    ],
)
def test_bombs_are_refused_by_their_header(data: bytes) -> None:
    assert "the limit is" in refused(data)


@pytest.mark.parametrize("kind", [b"zTXtk\0\0", b"iTXtk\0\1\0\0\0", b"iCCPk\0\0"])
def test_what_unpacks_to_more_than_it_is_worth_is_refused(kind: bytes) -> None:
    """A few kilobytes beside the pixels that would be 8 MiB; of the pixels themselves no more is read than fit."""
    bomb = zlib.compress(bytes(1 << 23), 9)
    assert "too large" in refused(png(1, 1, (8, 2), bytes(4), chunk(kind[:4], kind[4:] + bomb)))
    assert decode_image(png(1, 1, (8, 2), bytes(1 << 23)), LIMITS).size == (1, 1)


def test_colours_of_sixteen_bits() -> None:
    red = png(2, 1, (16, 2), b"\0" + struct.pack(">6H", 65_535, 0, 257, 32_768, 65_535, 0))
    assert np.asarray(decode_image(red, LIMITS)).tolist() == [[[255, 0, 1], [128, 255, 0]]]
    clear = png(2, 1, (16, 6), b"\0" + struct.pack(">8H", 65_535, 0, 0, 0, 0, 0, 65_535, 65_535))
    assert np.asarray(decode_image(clear, LIMITS)).tolist() == [[[255, 255, 255], [0, 0, 255]]]
    grey = png(2, 1, (16, 0), b"\0" + struct.pack(">2H", 257, 514), chunk(b"tRNS", struct.pack(">H", 257)))
    assert np.asarray(decode_image(grey, LIMITS)).tolist() == [[[255, 255, 255], [2, 2, 2]]]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_transparent_grey_of_few_bits(bits: int) -> None:
    most = (1 << bits) - 1
    for through in {0, most // 3, most}:
        count = 8 // bits
        greys = [through, *((most - i) % (most + 1) for i in range(count - 1))]
        row = sum(grey << (8 - bits * (i + 1)) for i, grey in enumerate(greys))
        data = png(count, 1, (bits, 0), bytes([0, row]), chunk(b"tRNS", struct.pack(">H", through)))
        expected = [255 if grey == through else grey * 255 // most for grey in greys]
        assert np.asarray(decode_image(data, LIMITS))[0, :, 0].tolist() == expected


def test_a_transparent_colour_of_sixteen_bits() -> None:
    row = struct.pack(">B6H", 0, 0x1234, 0x5678, 0x9ABC, 0x1200, 0x5600, 0x0000)
    data = png(2, 1, (16, 2), row, chunk(b"tRNS", struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)))
    assert np.asarray(decode_image(data, LIMITS)).tolist() == [[[255, 255, 255], [0x12, 0x56, 0]]]


def test_palettes_that_lack_colours() -> None:
    refused(png(1, 1, (8, 3), b"\0\5"))
    few = png(2, 1, (8, 3), b"\0\0\7", chunk(b"PLTE", b"\1\2\3"), chunk(b"tRNS", b"\xff"))
    assert decode_image(few, LIMITS).getpixel((0, 0)) == (1, 2, 3)


def test_no_frame_behind_the_first_is_looked_at() -> None:
    red, many = Image.new("RGB", (4, 4), "red"), [Image.new("RGB", (4, 4), (0, i, i)) for i in range(200)]
    data = encoded(red, "GIF", save_all=True, append_images=many)
    for animation in (data, data[:60] + b"\x99" * 4000):
        assert decode_image(animation, LIMITS).getpixel((3, 3)) == (255, 0, 0)


def test_pixels_that_are_not_there() -> None:
    assert "0 x 5" in refused(b"GIF89a\x00\x00\x05\x00\x00\x00\x00;" + bytes(20))


def test_damaged_metadata_is_no_damaged_picture() -> None:
    for exif in (b"Exif\x00\x00garbage", b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01", b"Exif\x00\x00"):
        result = decode_image(encoded(picture(), "JPEG", exif=exif), LIMITS)
        assert result.size == (40, 24)


def test_no_state_of_pillow_changes_and_no_warning_leaks() -> None:
    before = {"truncated": ImageFile.LOAD_TRUNCATED_IMAGES, "pixels": Image.MAX_IMAGE_PIXELS}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused(png_claiming(9_500, 9_500), MediaConfig(max_pixels=10**9))
        data = encoded(picture(), "TIFF")
        refused(data[: len(data) - 20] + bytes(4))
    assert caught == []
    after = {"truncated": ImageFile.LOAD_TRUNCATED_IMAGES, "pixels": Image.MAX_IMAGE_PIXELS}
    assert after == before


def test_threads() -> None:
    files = [encoded(picture(20 + i, 30), form) for i in range(8) for form in ("PNG", "JPEG", "WEBP", "TIFF")]
    alone = [decode_image(data, LIMITS).tobytes() for data in files]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda data: decode_image(data, LIMITS).tobytes(), files))
    assert together == alone
