"""Selection of FFmpeg's demuxer from the first bytes of a file, and detection of truncated files.

No other demuxer is tried: many of them read playlists, or open further files.
"""

from __future__ import annotations

from mmserve.encode.media import STILL_BRANDS

CONTAINERS = ("MP4", "MOV", "Matroska", "WebM", "AVI")
#: Further formats of a pushed segment.
STREAMED = ("MPEG-TS", "raw H.264", "raw H.265")
#: Demuxers of elementary streams, which have no timestamps; ``seek`` has no effect in them.
RAW = ("h264", "hevc")

TS_PACKET = 188  # bytes, ISO/IEC 13818-1
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
#: Boxes at the start of a media segment of fragmented MP4, which cannot be read without its initialisation segment.
_FRAGMENT_BOXES = (b"moof", b"styp", b"sidx", b"emsg", b"prft")
_CLUSTER = b"\x1f\x43\xb6\x75"  # starts a media segment of WebM
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
#: NAL unit headers at the start of an H.265 stream (types 32 to 35 and 39 of layer 0), and types for H.264.
_HEVC_HEADERS = (b"\x40\x01", b"\x42\x01", b"\x44\x01", b"\x46\x01", b"\x4e\x01")
_H264_TYPES = (5, 6, 7, 8, 9)


def file_demuxer(data: bytes) -> str | None:
    """FFmpeg's demuxer for an MP4, MOV, Matroska, WebM or AVI file; None = another format."""
    if data[:4] == _EBML:
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[4:8] == b"ftyp" and data[8:12] in STILL_BRANDS:
        return None
    return "mov" if data[4:8] in _BOXES else None


def segment_demuxer(data: bytes) -> str | None:
    """As ``file_demuxer``, also for MPEG-TS and for raw H.264 and H.265 (Annex B)."""
    known = file_demuxer(data)
    if known is not None:
        return known
    if data[:1] == b"\x47" and len(data) > TS_PACKET and data[TS_PACKET] == 0x47:
        return "mpegts"
    for start_code in (b"\0\0\0\1", b"\0\0\1"):
        if data.startswith(start_code):
            header = data[len(start_code) : len(start_code) + 2]
            if header in _HEVC_HEADERS:
                return "hevc"
            if header and header[0] < 0x80 and header[0] & 0x1F in _H264_TYPES:
                return "h264"
    return None


def needs_init(data: bytes) -> bool:
    """Whether ``data`` is a media segment of fragmented MP4 or WebM without its initialisation segment."""
    return data[4:8] in _FRAGMENT_BOXES or data[:4] == _CLUSTER


def is_image(data: bytes) -> bool:
    """Whether ``data`` has the signature of a picture format."""
    still = data[4:8] == b"ftyp" and data[8:12] in STILL_BRANDS
    return data.startswith(_IMAGES) or data[8:12] == b"WEBP" or still


def looks_like(data: bytes) -> str:
    """The probable format of an unsupported file, for an error message."""
    if is_image(data):
        return "an image"
    if data[:4] in (b"OggS", b"FLV\x01", b"fLaC") or data[:3] == b"ID3" or data[8:12] == b"WAVE":
        return "another media file"
    return "a file of unknown kind"


def cut_off(data: bytes, demuxer: str) -> bool:
    """Whether bytes are missing at the end according to the container's own sizes; invalid sizes are ignored here."""
    match demuxer:
        case "avi":
            return 8 + int.from_bytes(data[4:8], "little") > len(data) + 1  # the padding byte may be missing
        case "matroska":
            return _cut_off_matroska(data)
        case "mov":
            return _cut_off_mov(data)
        case "mpegts":
            return len(data) % TS_PACKET != 0
    return False


def _cut_off_matroska(data: bytes) -> bool:
    at = data.find(_SEGMENT, 0, 4096)
    head = data[at + 4 : at + 12]
    if at < 0 or not head or not head[0]:
        return False
    width = 9 - head[0].bit_length()
    size = int.from_bytes(head[:width], "big") & ((1 << 7 * width) - 1)
    return size != (1 << 7 * width) - 1 and at + 4 + width + size > len(data)  # all ones = unknown size


def _cut_off_mov(data: bytes) -> bool:
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:  # 0 = up to the end of the file
            return False
        at += size
    return at > len(data)
