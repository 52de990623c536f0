"""Commands that ask a server start without the libraries that a server needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mmserve.cli import main


def test_the_command_line_is_read_without_torch() -> None:
    program = (
        "import sys\nfrom mmserve.cli import build_parser\nbuild_parser()\n"
        "print([name for name in ('torch', 'transformers', 'llguidance') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        ("--help", ("asyncio", "grpc", "mmserve.client", "numpy", "PIL")),
        ("generate --help", ("av", "mmserve.reference", "mmserve.cli.demo")),
    ],
)
def test_a_command_imports_what_it_needs_alone(arguments: str, unwanted: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom mmserve.cli import main\n"
        f"try:\n    main({arguments.split()!r})\nexcept SystemExit:\n"
        f"    print([name for name in {unwanted!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n" and "usage: mmserve" in done.stdout


def test_the_bundled_model_is_served_without_what_takes_seconds_to_import() -> None:
    unwanted = (
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "transformers.models",
        "transformers.modeling_utils",
        "transformers.processing_utils",
    )
    program = (
        "import sys\nimport mmserve.cli.serve\nfrom PIL import Image\nfrom mmserve.assembly import BackgroundServer\n"
        "from mmserve.config import Config, ServerConfig\n"
        "with BackgroundServer(Config(server=ServerConfig(port=0))) as server, server.client() as client:\n"
        "    answer = client.generate('What is this?', [Image.new('RGB', (90, 60), 'red')], max_new_tokens=4)\n"
        f"print(bool(answer.text), [name for name in {unwanted!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mmserve.cli.import_module", interrupted)
    assert main(["models"]) == 130
