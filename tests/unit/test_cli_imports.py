"""Commands that ask a server start without the libraries that a server needs."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_is_read_without_torch() -> None:
    program = (
        "import sys\nfrom mmserve.cli import build_parser\nbuild_parser()\n"
        "print([name for name in ('torch', 'transformers', 'llguidance') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
