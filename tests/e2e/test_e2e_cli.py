"""The command line as a user meets it: what it prints where, and how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from e2e_helpers import Running, command, command_here, short_asks
from forked import ForkedCommand

from mmserve.bench import attention
from mmserve.cli import demo, main
from mmserve.config import from_mapping
from mmserve.errors import ConfigError

#: The C core of gRPC logs to stderr by itself, as in ``E1120 09:16:43.070831 4685 add_port.cc:83] …``.
GRPC_LOG = re.compile(r"[EWI]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\] ")


def assert_fails_clearly(done: object, *words: str) -> None:
    """Exit code 1, nothing on stdout, one line on stderr beside the log, and no traceback."""
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    told = [line for line in done.stderr.splitlines() if " INFO " not in line and not GRPC_LOG.match(line)]
    assert len(told) == 1 and told[0].startswith("mmserve "), done.stderr
    assert all(word in told[0] for word in words), told


def one_json(text: str) -> dict:
    assert text.endswith("\n") and text.count("\n") == 1
    return json.loads(text)


@pytest.fixture
def two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two of a round; one of them has its canvas shown."""
    last = list(demo._questions(5, 0))[3:]
    monkeypatch.setattr(demo, "_questions", lambda *_: last)


@pytest.mark.usefixtures("two_questions")
def test_the_demo_asks_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--items", "2"]) == 0
    report = one_json(capsys.readouterr().out)
    assert set(report) >= {"ok", "items", "accuracy", "machine"}
    assert report["ok"] is True and 0 <= report["accuracy"] <= 1
    assert len(report["items"]) == 2 and report["items"][1]["task"] == "json"
    kinds = {
        "task": str,
        "question": str,
        "expected": str,
        "answer": str,
        "correct": bool,
        "ttft_ms": float,
        "total_ms": float,
        "forwards": int,
        "tokens": int,
        "plain_ms": float,
        "plain_forwards": int,
        "plain_correct": bool,
        "same": bool,
    }
    for item in report["items"]:
        assert {name: type(item[name]) for name in kinds} == kinds
        assert item["forwards"] >= 1 and 0 < item["ttft_ms"] <= item["total_ms"] and not item["error"]
        assert item["plain_forwards"] > item["forwards"], "the default is the fast path"
    assert report["accuracy"] == sum(i["correct"] for i in report["items"]) / 2
    assert report["plain_forwards"] == sum(i["plain_forwards"] for i in report["items"])
    assert report["plain_ms"] == pytest.approx(sum(i["plain_ms"] for i in report["items"]), abs=0.5)
    assert report["machine"]["cores"] >= 1


@pytest.mark.usefixtures("two_questions")
def test_the_demo_talks_to_people_and_saves_its_scenes(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = tmp_path / "new" / "scenes"
    assert main(["demo", "--items", "2", "--server", server.address, "--save", str(scenes)]) == 0
    out = capsys.readouterr().out
    assert "of 2 right," in out and "plain decoding:" in out and "times as fast" in out
    assert "forward passes" in out and "▒" in out
    assert len(list(scenes.glob("*.png"))) == 2


def test_generate_answers_about_an_image(server: Running, tmp_path: Path) -> None:
    ask = short_asks(1)[0]
    path = tmp_path / "scene.png"
    path.write_bytes(ask.images[0])
    done = command(
        "generate", ask.prompt, "--image", str(path), "--server", server.address, "--json", "--max-new-tokens", "8"
    )
    assert done.returncode == 0, done.stderr
    told = one_json(done.stdout)
    expected = server.client.generate(ask.prompt, images=[path], max_new_tokens=8)
    assert (told["text"], told["reason"], told["forwards"]) == (
        expected.text,
        expected.finish_reason,
        expected.forwards,
    )
    assert told["usage"]["visual_tokens"] == expected.usage.visual_tokens > 0


def test_generate_starts_a_server_of_its_own_and_reads_stdin(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "How many shapes are there?"
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    given = ("--max-new-tokens", "6", "--temperature", "3", "--seed", "5", "--set", "engine.torch_threads=1")
    assert main(["generate", "-", *given]) == 0
    expected = server.client.generate(prompt, max_new_tokens=6, temperature=3.0, seed=5)
    assert capsys.readouterr().out == expected.text + "\n"


def test_generate_takes_policies_by_name(server: Running) -> None:
    policies = ("--recompute", "dkv_decode", "--commit", "threshold")
    done = command_here("generate", "x", "--server", server.address, "--max-new-tokens", "4", "--json", *policies)
    assert done.returncode == 0, done.stderr
    wrong = command_here("generate", "x", "--server", server.address, "--recompute", "magic")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert (
        "argument --recompute: must be one of adaptive, block, dkv_decode" in wrong.stderr and "'magic'" in wrong.stderr
    )


def test_generate_says_what_is_wrong_with_an_image(server: Running, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\n but no more")
    to = ("--server", server.address)
    assert_fails_clearly(
        command_here("generate", "x", "--image", str(bad), *to), "generate", "messages[0].parts[0].image"
    )
    assert_fails_clearly(command_here("generate", "x", "--image", str(tmp_path / "none.png"), *to), "none.png")
    assert_fails_clearly(command_here("generate", "x", "--image", str(tmp_path), *to), str(tmp_path))


@pytest.mark.parametrize("stdin", [b"\xff\xfe\x00 no text", b""], ids=["no text", "nothing"])
def test_generate_survives_any_stdin(server: Running, stdin: bytes) -> None:
    done = command("generate", "-", "--server", server.address, "--max-new-tokens", "2", stdin=stdin)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--max-new-tokens", "0"), "--max-new-tokens: "),
        (("--max-new-tokens", "-5"), "--max-new-tokens: "),
        (("--temperature", "nan"), "--temperature: "),
        (("--seed", "-1"), "--seed: "),
        (("--timeout", "0"), "timeout"),
    ],
)
def test_generate_refuses_bad_values(
    server: Running, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], word: str
) -> None:
    assert main(["generate", "x", "--server", server.address, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and word in err


def test_what_a_running_server_is_asked_for_is_its_own(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    to = ("--server", server.address)
    assert main(["generate", "How many?", "--max-new-tokens", "2", *to, "--model", "bundled"]) == 0
    assert main(["models", *to, "--model", "bundled"]) == 0
    assert capsys.readouterr().err == ""
    for wrong, word in (
        (("--model", "bundled-causal"), "no model 'bundled-causal' here; there is bundled"),
        (("--model", "bundled", "--model", "other"), "--model"),
        (("--set", "server.port=0"), "--set"),
        (("--companion", "bundled-causal"), "--companion"),
        (("--config", "mmserve.toml"), "--config"),
    ):
        for command_line in (["generate", "x"], ["models"]):
            assert main([*command_line, *to, *wrong]) == 1
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and word in err


def test_generate_prints_the_tokens_of_the_prompt_and_the_answer(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", "Hi", "--server", server.address, "--json", "--raw"]
    assert main([*asked, "--max-new-tokens", "2", "--tokens", "--return-prompt"]) == 0
    found = one_json(capsys.readouterr().out)
    for token in found["tokens"]:
        assert bytes(token["text_bytes"]).decode(errors="replace") == token["text"]
    assert found["prompt"]["prompt_text"].endswith("Hi") and len(found["prompt"]["prompt_ids"]) > 0
    assert main([*asked, "--max-new-tokens", "0", "--return-prompt"]) == 0
    assert one_json(capsys.readouterr().out)["text"] == ""
    for flag in ("--tokens", "--return-prompt", "--prompt-tokens"):
        assert main([*asked[:-2], "--raw", flag]) == 1
        assert f"{flag}: is printed with --json only" in capsys.readouterr().err
    assert main([*asked, "--prompt-tokens", "--prompt-alternatives", "1"]) == 1
    assert "--prompt-tokens" in capsys.readouterr().err


def test_generate_says_where_the_budget_was_used_up(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "Describe the scene as JSON.", "--server", server.address, "--max-new-tokens", "2"]
    assert main(asked) == 0
    told = capsys.readouterr()
    assert told.out.count("\n") == 1 and "all of --max-new-tokens 2 were used" in told.err
    assert main([*asked, "--json"]) == 0
    assert not capsys.readouterr().err


def test_what_is_wrong_is_said_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mmserve.assembly.BackgroundServer", None)
    for flag in ("--image", "--video"):
        assert main(["generate", "x", flag, str(tmp_path / "none")]) == 1
        assert f"{flag}: there is no file {tmp_path / 'none'}" in capsys.readouterr().err
    monkeypatch.setenv("MMSERVE_TOKEN", "ä")
    assert main(["models", "--server", "localhost:1"]) == 1
    assert capsys.readouterr().err == "mmserve models: a token must be printable ASCII\n"


def test_grpc_logs_nothing_to_stderr_by_itself() -> None:
    """A server without TLS, of which gRPC's core logs that the handshake failed."""

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        asked = [
            sys.executable,
            "-m",
            "mmserve",
            "models",
            "--tls",
            "--server",
            f"127.0.0.1:{listener.getsockname()[1]}",
        ]
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run(asked, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("mmserve models: ")


def test_a_reader_who_has_seen_enough_is_no_error(server: Running) -> None:
    read, write = os.pipe()
    os.close(read)
    asked = [sys.executable, "-m", "mmserve", "models", "--server", server.address]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(asked, stdout=closed, stderr=subprocess.PIPE, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    "slip", [("demo", "--items", "0"), ("demo", "--items", "-3"), ("models", "--server", "localhost")]
)
def test_a_demo_of_nothing_and_a_server_without_a_port_are_refused(
    capsys: pytest.CaptureFixture[str], slip: tuple[str, str, str]
) -> None:
    assert main([*slip]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and slip[1] in err


def test_no_server_is_an_error_of_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: nobody answers there
        done = command("models", "--server", f"127.0.0.1:{taken.getsockname()[1]}")
    assert_fails_clearly(done, "models")


def test_models_are_listed(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--server", server.address, "--json"]) == 0
    (model,) = one_json(capsys.readouterr().out)["models"]
    assert model["name"] == "bundled" and model["images"] is True
    assert set(model["recompute_policies"]) >= {"none", "dkv_decode"}
    assert set(model["kernels"]) >= {"cached_attention", "rope_scatter"}
    assert main(["models", "--server", server.address]) == 0
    assert capsys.readouterr().out.startswith("bundled: ")


def test_serve_refuses_a_port_in_use(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.address.rpartition(":")[2]
    code = main(["serve", "--set", f"server.port={port}"])
    done = CompletedProcess((), code, *capsys.readouterr())
    assert_fails_clearly(done, "serve", port, "another program uses the port")


BROKEN = {
    "no TOML": ("[server\nport = 1", "not valid TOML"),
    "unknown table": ("[sever]\nport = 1", "unknown table 'sever'"),
    "unknown key": ("[server]\nprot = 1", "no key 'prot'"),
    "wrong type": ('[server]\nport = "high"', "port must be"),
    "a number that cannot be": ("[engine]\nmax_running = 0", "max_running must be at least 1"),
    "no models": ("models = []", "at least one model"),
    "a model that is not there": ('[[models]]\npath = "/no/such/folder"', "/no/such/folder"),
    "two models of one name": ("[[models]]\n[[models]]", "two models are named 'bundled'"),
    "a key without its certificate": ('[server]\ntls_key = "x"', "must be set together"),
    "a certificate that is not there": ('[server]\ntls_key = "/no/k"\ntls_certificate = "/no/c"', "/no/"),
    "too few pages": ("[engine]\npages = 3\nmax_tokens = 1024", "pages"),
    "pages for which there is no memory": ("[engine]\npages = 1000000000000", "no memory"),
    "an unknown device": ('[[models]]\ndevice = "abacus"', "abacus"),
    "an unknown dtype": ('[[models]]\ndtype = "float12"', "float12"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_serve_refuses_a_broken_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    text, why = BROKEN[kind]
    path = tmp_path / "broken.toml"
    path.write_text(text)
    assert main(["serve", "--config", str(path), "--set", "server.port=0"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("mmserve serve: ") and why in err and err.count("\n") == 1


def test_serve_refuses_a_configuration_that_is_not_there_in_a_process_too(tmp_path: Path) -> None:
    assert_fails_clearly(command("serve", "--config", str(tmp_path / "none.toml")), "none.toml")
    log = tmp_path / "stderr.txt"
    with ForkedCommand(["serve", "--model", str(tmp_path)], log) as loading:
        out, code = loading.stdout.read(), loading.wait(280)
    assert_fails_clearly(CompletedProcess((), code, out, log.read_text()), str(tmp_path))


@pytest.mark.parametrize("override", ["port=1", "server.port", "models.name=x", "server.port=high", "nothing.x=1"])
def test_serve_refuses_a_bad_override(capsys: pytest.CaptureFixture[str], override: str) -> None:
    assert main(["serve", "--model", "bundled", "--set", override]) == 1
    err = capsys.readouterr().err
    assert err.startswith("mmserve serve: ") and err.count("\n") == 1


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    """gRPC would take it, and listen on another one."""
    with pytest.raises(ConfigError, match="port"):
        from_mapping({"server": {"port": port}})


@pytest.mark.parametrize("arguments", [["fly"], [], ["generate"], ["bench", "flight"], ["demo", "--items", "many"]])
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "usage: mmserve" in err


def test_an_unknown_command_in_a_process_exits_with_2() -> None:
    done = command("fly")
    assert (done.returncode, done.stdout) == (2, "") and "invalid choice: 'fly'" in done.stderr


@pytest.mark.slow
def test_the_serving_benchmark_reports_every_pair() -> None:
    small = ("--set", "engine.torch_threads=1")
    done = command("bench", "serving", "--limit", "2", "--repeats", "1", "--json", *small)
    assert done.returncode == 0, done.stderr
    report = one_json(done.stdout)
    assert report["bench"] == "serving" and report["machine"]["torch"]
    *policies, throughput = report["rows"]
    assert [row["measured"] for row in policies][:2] == ["none × low_confidence", "dkv_decode × low_confidence"]
    assert all(row["total_ms"] > 0 and 0 <= row["accuracy"] <= 1 and row["forwards"] >= 1 for row in policies)
    assert policies[0]["speedup"] == 1.0
    assert throughput["answers_equal"] is True
    assert throughput["serial_per_second"] > 0 and throughput["concurrent_per_second"] > 0


def test_the_constraint_benchmark_asks_with_and_without(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ("--tasks", "scenes", "--commit", "threshold", "--recompute", "dual", "--set", "engine.torch_threads=1")
    assert main(["bench", "constraint", "--limit", "1", "--json", *fast]) == 0
    report = one_json(capsys.readouterr().out)
    assert report["bench"] == "constraint" and report["machine"]["torch"] and "search" not in report
    assert report["settings"]["commit"] == "threshold" and report["settings"]["recompute"] == "dual"
    ways = [(row["task"], row["steps"], row["constrained"]) for row in report["rows"]]
    assert ways == [("scenes", steps, constrained) for steps in ("all", "1/4") for constrained in (False, True)]
    for row in report["rows"]:
        assert row["items"] == 1 and row["exact_share"] in (0, 1) and row["tokens_per_step"] > 0
        if row["constrained"]:
            assert row["valid_share"] == 1 and row["late"] == 0 and 0 <= row["fallback_share"] <= 1
            assert 0 < row["step_ms_p50"] <= row["step_ms_p99"] and row["forward_share"] > 0
        else:
            assert row["step_ms_p50"] is row["forward_share"] is row["fallback_share"] is None


def test_the_constraint_benchmark_names_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "constraint", "--tasks", "scenes,json"]) == 1
    assert "--tasks: 'json' is not one of scenes, schemas, search" in capsys.readouterr().err


@pytest.mark.slow
def test_the_http_benchmark_measures_a_model_that_has_no_drafts() -> None:
    causal = ("bench", "http", "--model", "bundled-causal", "--repeats", "2", "--set", "engine.torch_threads=1")
    done = command(*causal, "--json")
    assert done.returncode == 0, done.stderr
    names = [measure["name"] for measure in one_json(done.stdout)["measures"]]
    assert "a short request" in names and not [name for name in names if "drafts" in name]
    assert_fails_clearly(command(*causal, "--tasks", "front,slow"), "'slow' needs a diffusion model")


@pytest.mark.slow
def test_the_decode_benchmark_sets_a_pair_beside_the_baseline(tmp_path: Path) -> None:
    given = ("--limit", "2", "--tasks", "what", "--commit", "threshold", "--concurrent", "2")
    small = ("--set", "engine.torch_threads=1", "--plot", str(tmp_path / "pairs.png"))
    done = command("bench", "decode", *given, *small, "--json")
    assert done.returncode == 0, done.stderr
    report = one_json(done.stdout)
    assert report["bench"] == "decode" and report["settings"]["items"] == 2
    baseline, pair = report["rows"]
    assert (baseline["recompute"], baseline["commit"], baseline["speedup"]) == ("none", "low_confidence", 1.0)
    assert (pair["recompute"], pair["commit"]) == ("none", "threshold")
    assert pair["baseline_forwards"] == baseline["forwards"] == 32 and pair["forwards"] <= 32
    assert pair["baseline_accuracy"] == baseline["accuracy"] and 0 <= pair["accuracy"] <= 1
    assert (tmp_path / "pairs.png").read_bytes().startswith(b"\x89PNG")
    assert_fails_clearly(command("bench", "decode", "--tasks", "flight"), "flight")


@pytest.mark.slow
def test_the_kernel_benchmark_measures_an_op_and_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "kv_quant.csv"
    assert main(["bench", "kernels", "--tasks", "kv_quant", "--limit", "2", "--json", "--csv", str(table)]) == 0
    report = one_json(capsys.readouterr().out)
    assert report["bench"] == "kernels" and report["settings"]["gpu"] == "none"
    assert all(row["right"] and row["path"] == "pytorch" and row["microseconds"][1] > 0 for row in report["rows"])
    assert len(table.read_text().splitlines()) == len(report["rows"]) + 1
    assert main(["bench", "kernels", "--tasks", "flight"]) == 1
    assert "--tasks: 'flight' is not one of" in capsys.readouterr().err


@pytest.mark.slow
def test_the_attention_benchmark_tells_what_fewer_and_coarser_keys_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = ("vertical_slash", "8 bits")
    chosen = [
        v
        for v in attention.variants()
        if v.row["measured"] in few and v.row.get("density", 0.25) == 0.25 and not v.row.get("kept")
    ]
    monkeypatch.setattr(attention, "variants", lambda: chosen)
    given = ("--tasks", "what", "--limit", "1", "--set", "engine.torch_threads=1", "--json")
    rows = tmp_path / "rows"
    assert main(["bench", "attention", *given, "--resume", str(rows)]) == 0
    sparse, coarse = one_json(capsys.readouterr().out)["rows"]
    monkeypatch.setattr(attention, "evaluate", None)  # all is there
    assert main(["bench", "attention", *given, "--resume", str(rows)]) == 0
    assert one_json(capsys.readouterr().out)["rows"] == [sparse, coarse]
    assert 0.25 < sparse["share"] < 0.4
    assert sparse["nats"] > coarse["nats"] >= 0
    assert sparse["largest"] > coarse["largest"] > 0
    assert {sparse["accuracy"], coarse["accuracy"]} <= {0, 1}
    assert main(["bench", "attention", "--tasks", "flight"]) == 1
    assert "flight" in capsys.readouterr().err


@pytest.mark.parametrize("few", [("--limit", "0"), ("--repeats", "0"), ("--limit", "1", "--repeats", "1")])
def test_a_benchmark_of_too_little_is_refused(capsys: pytest.CaptureFixture[str], few: tuple[str, ...]) -> None:
    assert main(["bench", "serving", *few]) == 1
    assert few[0] in capsys.readouterr().err


def test_an_answer_is_guided_on_request(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step runs two sequences; a scale out of range is refused with its option."""
    asked = ["generate", "What is 2 + 3?", "--recompute", "none", "--max-new-tokens", "8", "--json", "--server"]
    run = []
    for scale in ("0", "0.5"):
        assert main([*asked, server.address, "--cfg-scale", scale]) == 0
        done = one_json(capsys.readouterr().out)
        run.append(done["recomputed_tokens"] / done["forwards"])
    assert run[1] == 2 * run[0]
    assert main([*asked, server.address, "--cfg-scale", "-1"]) == 1
    assert "--cfg-scale: " in capsys.readouterr().err


def test_an_empty_answer_is_said(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "x", "--regex", "()", "--max-new-tokens", "4", "--server", server.address]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("\n", "(the answer is empty: the model ended at once)\n")
    assert main([*asked, "--n", "2"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"sample {i}: (the answer is empty: the model ended at once)" for i in (0, 1)]
    assert main([*asked, "--json"]) == 0
    assert one_json(capsys.readouterr().out)["text"] == ""


def test_a_token_on_the_command_line_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["models", "--server", "localhost:1", "--token", "a-secret"])
    err = capsys.readouterr().err
    assert raised.value.code == 2 and "MMSERVE_TOKEN" in err and "a-secret" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    pytest.importorskip("shtab", reason="in the extras `completion` and `test`")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "mmserve" in script and "generate" in script and "max-new-tokens" in script and "log-format" in script


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "mmserve[completion]" in capsys.readouterr().err


def test_a_port_in_use_is_reported_before_pytorch_is_imported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for key in ("port", "http_port", "metrics_port"):
            other = () if key == "port" else ("--set", "server.port=0")
            done = command("serve", "--set", f"server.{key}={port}", *other)
            assert_fails_clearly(done, f"choose one with --set server.{key}=N")
            assert "importing PyTorch" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("pin",), "pin needs ids of entries"),
        (("warm",), "warm needs a prompt"),
        (("drop", "zzz"), "no entry begins with zzz"),
    ],
)
def test_the_cache_command_says_what_is_missing(
    server: Running, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert main(["cache", "--server", server.address, *arguments]) == 1
    assert why in capsys.readouterr().err


def test_an_unknown_option_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--confg", "x"])
    assert "unknown arguments: --confg x; see mmserve serve --help" in capsys.readouterr().err


def test_an_export_to_no_folder_is_refused_before_the_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "gguf", "--model", "/no/model", "--out", "/no/folder/x.gguf"]) == 1
    assert capsys.readouterr().err == "mmserve export: --out: there is no folder /no/folder\n"


def test_a_missing_extra_is_reported_before_pytorch_is_imported() -> None:
    program = (
        "import sys\nsys.modules['starlette'] = None\nfrom mmserve.cli import main\n"
        "code = main(['serve', '--http', '1', '--set', 'server.port=0'])\n"
        "sys.exit(code if 'torch' not in sys.modules else 'torch was imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert_fails_clearly(done, "needs the package 'starlette': run pip install 'mmserve[http]'")


def test_a_cluster_file_that_is_not_there_is_reported_before_pytorch_is_imported() -> None:
    done = command("serve", "--cluster", "/no/cluster.toml", "--set", "server.port=0")
    assert_fails_clearly(done, "--cluster: there is no file /no/cluster.toml")
    assert "importing PyTorch" not in done.stderr
