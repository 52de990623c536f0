"""Files that are no pictures, or odd ones: a typed error that names the part, or an answer; never more than that."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable

import grpc
import numpy as np
import pytest
from e2e_helpers import Gates, Running, answer, wait_for
from PIL import Image

from mmserve.core.request import Stage
from mmserve.errors import FieldViolation, InvalidArgument, NotFound
from mmserve.reference.scenes import draw_scene
from mmserve.v1 import generation_pb2 as pb
from mmserve.v1 import generation_pb2_grpc
from mmserve.wire.status import from_rpc_error

FIELD = "messages[0].parts[0].image"
QUESTION = "How many shapes are there?"


def picture(seed: int = 0) -> Image.Image:
    return draw_scene(random.Random(seed)).picture


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises ``width`` x ``height`` pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("scene.png", saved(picture(), "PNG"))
    return file.getvalue()


def test_a_model_of_a_fixed_size_refuses_pixels_over_the_wire(server: Running) -> None:
    with pytest.raises(InvalidArgument, match="resizes pictures to a fixed size; leave it out") as caught:
        ask(server, saved(picture(), "PNG"), max_pixels=784)
    assert [violation.field for violation in caught.value.violations] == ["vision.max_pixels"]
    with pytest.raises(InvalidArgument) as caught:
        ask(server, saved(picture(), "PNG"), min_pixels=9, max_pixels=3)
    assert [violation.field for violation in caught.value.violations] == ["vision.min_pixels"]
    assert ask(server, saved(picture(), "PNG")).text


def ask(server: Running, *images: bytes | str, **options: object):
    return server.client.generate(QUESTION, images=images, max_new_tokens=4, **options)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut off PNG": (lambda: saved(picture(), "PNG")[:-300], "damaged or cut off PNG"),
    "PNG header alone": (lambda: saved(picture(), "PNG")[:33], "damaged|readable"),
    "cut off JPEG": (lambda: saved(picture(), "JPEG")[:-600], "damaged or cut off JPEG"),
    "PNG with a wrong checksum": (lambda: saved(picture(), "PNG").replace(b"IDAT", b"IDAX"), "damaged|not a readable"),
    "decompression bomb": (lambda: bomb(16_000, 16_000), "pixels"),
    "bomb of 4 billion a side": (lambda: bomb(2**31 - 1, 2**31 - 1), "pixels"),
    "20,000 pixels wide": (lambda: saved(Image.new("1", (20_000, 2)), "PNG"), "20000 x 2 pixels; the limit is 16384"),
    "text": (lambda: b"this is no picture\n" * 20, "is text, not a readable"),
    "zip": (zipped, "an archive, not a readable"),
    "video": (lambda: b"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00isomiso2avc1mp41" + bytes(600), "a video"),
    "noise": (lambda: random.Random(0).randbytes(3000), "not a readable"),
    "PDF": (lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n" + bytes(200), "a PDF"),
    "one zero byte": (lambda: b"\x00", "not a readable"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_files_that_are_no_whole_picture_are_refused_by_name(server: Running, kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(InvalidArgument, match=why) as raised:
        ask(server, make())
    assert [v.field for v in raised.value.violations] == [FIELD]


def test_an_empty_file_is_refused(server: Running) -> None:
    with pytest.raises(InvalidArgument) as raised:
        ask(server, b"")
    assert raised.value.violations == (FieldViolation(f"{FIELD}.data", "must not be empty"),)


def test_a_file_above_the_limit_is_refused(server: Running) -> None:
    limit = server.background.config.media.max_item_bytes
    with pytest.raises(InvalidArgument, match=f"at most {limit} bytes") as raised:
        ask(server, b"\x89PNG\r\n\x1a\n" + bytes(limit))
    assert raised.value.violations[0].field == f"{FIELD}.data"
    with pytest.raises(InvalidArgument, match=f"at most {limit} bytes"):
        server.client.upload(bytes(limit + 1))


def test_the_error_names_the_one_bad_picture_of_several(server: Running) -> None:
    good = saved(picture(), "PNG")
    with pytest.raises(InvalidArgument) as raised:
        ask(server, good, good[:-200], good)
    assert raised.value.violations[0].field == "messages[0].parts[1].image"


def test_too_many_images_are_refused_and_the_most_allowed_are_answered(server: Running) -> None:
    info = server.client.describe()
    image = server.client.upload(picture())
    result = ask(server, *[image] * info.max_images)
    assert result.usage.visual_tokens == info.max_images * info.visual_tokens_per_image
    with pytest.raises(InvalidArgument, match=f"at most {info.max_images} images, not {info.max_images + 1}") as raised:
        ask(server, *[image] * (info.max_images + 1))
    assert raised.value.violations[0].field == "messages"


def rotated(kind: str) -> tuple[bytes, bytes]:
    """A file whose EXIF data say how to turn it, and the same picture upright."""
    upright = picture(1)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it clockwise to see it upright
    return saved(upright.transpose(Image.Transpose.ROTATE_90), kind, exif=exif), saved(upright, kind)


def animation() -> tuple[bytes, bytes]:
    frames = [picture(seed).convert("P") for seed in range(3)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:]), saved(frames[0], "GIF")


def deep_grey() -> tuple[bytes, bytes]:
    shallow = np.asarray(picture(2).convert("L"))
    return saved(Image.fromarray(shallow.astype(np.uint16) * 257), "PNG"), saved(Image.fromarray(shallow), "PNG")


def see_through() -> tuple[bytes, bytes]:
    layer = picture(3).convert("RGBA")
    layer.putalpha(255)
    return saved(layer, "PNG"), saved(picture(3), "PNG")


def palette() -> tuple[bytes, bytes]:
    few = picture(4).quantize(16)
    return saved(few, "PNG"), saved(few.convert("RGB"), "PNG")


SAME: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "rotated PNG": lambda: rotated("PNG"),
    "rotated TIFF": lambda: rotated("TIFF"),
    "animated GIF, by its first frame": animation,
    "16 bits of grey": deep_grey,
    "opaque alpha": see_through,
    "palette": palette,
    "lossless WebP": lambda: (saved(picture(5), "WEBP", lossless=True), saved(picture(5), "PNG")),
    "BMP": lambda: (saved(picture(6), "BMP"), saved(picture(6), "PNG")),
}


@pytest.mark.parametrize("kind", SAME)
def test_one_picture_in_two_forms_gets_one_answer(server: Running, kind: str) -> None:
    odd, plain = SAME[kind]()
    assert odd != plain
    given = {"temperature": 2.0, "seed": 3, "snapshots": True, "max_new_tokens": 12, "steps": 4}
    events = [list(server.client.stream(QUESTION, images=[data], **given)) for data in (odd, plain)]
    shown = [[e.text for e in stream if hasattr(e, "text")] for stream in events]
    assert shown[0] == shown[1]
    assert answer(events[0][-1]) == answer(events[1][-1])


def rotated_jpeg() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 8
    return saved(picture(), "JPEG", exif=exif)


ANSWERED: dict[str, Callable[[], bytes]] = {
    "CMYK JPEG": lambda: saved(picture().convert("CMYK"), "JPEG"),
    "rotated JPEG": rotated_jpeg,
    "one pixel": lambda: saved(Image.new("RGB", (1, 1), "red"), "PNG"),
    "one black or white pixel": lambda: saved(Image.new("1", (1, 1)), "PNG"),
    "one row": lambda: saved(Image.new("RGB", (3000, 1)), "PNG"),
    "one column": lambda: saved(Image.new("L", (1, 3000)), "PNG"),
    "half transparent": lambda: saved(Image.new("RGBA", (50, 40), (255, 0, 0, 128)), "PNG"),
    "transparent palette": lambda: saved(Image.new("P", (30, 30)), "PNG", transparency=0),
    "damaged EXIF": lambda: saved(picture(), "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"),
    "junk behind the end": lambda: saved(picture(), "PNG") + b"junk" * 100,
}


@pytest.mark.parametrize("kind", ANSWERED)
def test_odd_pictures_are_answered(server: Running, kind: str) -> None:
    result = ask(server, ANSWERED[kind]())
    assert result.usage.visual_tokens == server.client.describe().visual_tokens_per_image


def test_an_upload_gives_the_answer_of_its_bytes(server: Running) -> None:
    data = saved(picture(9), "PNG")
    media_id = server.client.upload(data)
    assert media_id == server.client.upload(data)
    assert answer(ask(server, media_id, seed=1, temperature=2.0)) == answer(ask(server, data, seed=1, temperature=2.0))


def test_an_upload_that_is_no_picture_is_refused_where_it_is_used(server: Running) -> None:
    media_id = server.client.upload(b"no picture at all")
    with pytest.raises(InvalidArgument, match="is text") as raised:
        ask(server, media_id)
    assert raised.value.violations[0].field == FIELD


def test_an_unknown_media_id_is_not_found(server: Running) -> None:
    with pytest.raises(NotFound, match="no media 'sha256:0"):
        ask(server, "sha256:" + "0" * 64)


@pytest.mark.parametrize("media_id", ["", "sha256:", "sha256:" + "0" * 63, "sha256:" + "G" * 64, "../../etc/passwd"])
def test_a_malformed_media_id_is_refused_by_the_server_too(server: Running, media_id: str) -> None:
    with pytest.raises(InvalidArgument, match="media id"):
        ask(server, media_id)
    message = pb.GenerateRequest(
        messages=[{"role": "ROLE_USER", "parts": [{"image": {"media_id": media_id}}, {"text": QUESTION}]}]
    )
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as raised:
        list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=30))
    error = from_rpc_error(raised.value)
    assert isinstance(error, InvalidArgument)
    assert [v.field for v in error.violations] == [f"{FIELD}.media_id"]


def test_a_bad_picture_fails_alone_among_the_good_ones_it_is_encoded_with(server: Running, gates: Gates) -> None:
    images = [saved(picture(seed), "PNG") for seed in range(5)]
    alone = [answer(ask(server, image)) for image in images]
    gates.encode.close()
    first = server.ask("holds the encoder", images=[saved(picture(9), "PNG")])
    server.reach("holds the encoder", Stage.ENCODING)
    asked = [server.start(ask, server, data) for data in (*images[:2], images[0][:-200], *images[2:])]
    bad = asked.pop(2)
    assert isinstance(bad.exception(60), InvalidArgument)
    wait_for(
        "all to be decoded",
        lambda: [r.stage for r in server.engine._live].count(Stage.LOADED) == 5,
    )
    gates.encode.open()
    first.result(60)
    assert [answer(f.result(60)) for f in asked] == alone
    assert max(gates.encode.sizes) > 1
