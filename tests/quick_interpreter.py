"""Triton's interpreter without what it does again at each call of a device function.

As of Triton 3.7 whenever a kernel calls a function of ``@triton.jit``, ``tl.sum`` and ``tl.zeros`` among them, all
members of ``triton.language`` are looked at, to replace its builtins, though the kernel's launch has replaced them:
milliseconds a call. Here each module is looked at once a launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_QUICK = "modules are replaced once a launch"
_LANGUAGES = {id(tl): "tl", id(tl.core): "core"}


def quicken() -> None:
    """Replace each module's builtins once a launch; a second call changes nothing."""
    scope = interpreter._LangPatchScope
    if getattr(scope, _QUICK, False):
        return
    setattr(scope, _QUICK, True)
    patch, restore = interpreter._patch_lang, scope.restore
    replaced: set[str] = set()  # by the launch in progress

    def patch_lang(function: Callable[..., Any]) -> Any:
        if replaced.issuperset(languages(function)):
            return scope()
        replaced.update(languages(function))
        return patch(function)

    def restored(self: Any) -> None:
        replaced.clear()
        restore(self)

    interpreter._patch_lang = patch_lang
    scope.restore = restored


@cache
def languages(function: Callable[..., Any]) -> frozenset[str]:
    """Which of Triton's modules of builtins a function sees."""
    seen = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(_LANGUAGES[id(module)] for module in seen if id(module) in _LANGUAGES)
