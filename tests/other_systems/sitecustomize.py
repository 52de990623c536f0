"""Takes from a Python process what only Linux has: calls of ``os``, ``/proc`` and ``/sys``, and Triton.

Python imports it at its start where its folder is in ``PYTHONPATH``. psutil, which reads ``/proc`` here and asks the
system elsewhere, and multiprocessing keep them.
"""

import builtins
import importlib.abc
import io
import os
import sys

_FOLDERS = ("/proc/", "/sys/")
_KEEP = ("psutil", "multiprocessing")

for _name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fadvise"):
    if hasattr(os, _name):
        delattr(os, _name)


class _NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without_folders(call):
    def run(path, *arguments, **options):
        missing = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(_FOLDERS)
        caller = sys._getframe(1).f_code.co_filename
        if missing and not any(each in caller for each in _KEEP):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **options)

    return run


sys.meta_path.insert(0, _NoTriton())
builtins.open = io.open = _without_folders(builtins.open)
os.open, os.stat = _without_folders(os.open), _without_folders(os.stat)
