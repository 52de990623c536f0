"""llama.cpp's GBNF as llguidance's Lark dialect, by the converter that llguidance ships."""

from __future__ import annotations

from mmserve.constraint.cfg import checked_lark
from mmserve.constraint.findings import Refused
from mmserve.constraint.limits import MAX_GRAMMAR_BYTES


def to_lark(text: str) -> str:
    """The Lark grammar with the sentences of the GBNF ``text``. Raises ``Refused``."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # only the child process needs it

    if len(text.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise Refused.at("", "gbnf", f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    try:
        converted = gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise Refused.at(f"/{error.pos.text.count(chr(10), 0, error.pos.pos) + 1}", "gbnf", str(error)) from error
    except RecursionError as error:
        raise Refused.at("", "gbnf", "is nested too deep") from error
    return checked_lark(converted.removeprefix("%llguidance {}"))
