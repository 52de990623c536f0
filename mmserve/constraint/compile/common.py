"""The terminals that ``%import common`` gives.

Their languages are those of Lark's ``lark/grammars/common.lark`` (lark-parser/lark, 9bae961), as expressions: where
that file repeats lazily up to an end, the end is not in what is repeated.
"""

from __future__ import annotations

_INT = "[0-9]+"
_SIGN = "[+-]?"
_EXP = f"[eE]{_SIGN}{_INT}"
_DECIMAL = rf"(?:{_INT}\.(?:{_INT})?|\.{_INT})"
_FLOAT = f"(?:{_INT}{_EXP}|{_DECIMAL}(?:{_EXP})?)"
_NUMBER = f"(?:{_FLOAT}|{_INT})"

#: Expressions by name.
COMMON: dict[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": _INT,
    "SIGNED_INT": _SIGN + _INT,
    "DECIMAL": _DECIMAL,
    "_EXP": _EXP,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": _SIGN + _FLOAT,
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": _SIGN + _NUMBER,
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}
