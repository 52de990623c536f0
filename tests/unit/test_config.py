"""Configuration: every wrong file is refused with what is wrong in it, and "auto" is resolved once."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import (
    Config,
    EncoderCacheConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    from_mapping,
    load,
    resolve,
)
from mmserve.errors import ConfigError

TABLES: dict[str, type[Any]] = {"server": ServerConfig, "engine": EngineConfig, "media": MediaConfig}
KEYS = [(table, f.name, f.default) for table, kind in TABLES.items() for f in dataclasses.fields(kind)]
COUNTS = [
    "max_queued",
    "max_running",
    "max_pending_per_stage",
    "page_size",
    "encode_batch",
    "max_samples",
]


def toml(value: Any) -> str:
    """``value`` as TOML, enough for what a config holds."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def written(config: Config) -> str:
    lines = []
    for table in TABLES:
        lines.append(f"[{table}]")
        lines += [f"{k} = {toml(v)}" for k, v in dataclasses.asdict(getattr(config, table)).items()]
    for model in config.models:
        lines.append("[[models]]")
        lines += [f"{k} = {toml(v)}" for k, v in dataclasses.asdict(model).items()]
    return "\n".join(lines)


words = st.text(st.characters(codec="utf-8"), max_size=8)
sizes = st.integers(1, 1 << 40)
configs = st.builds(
    Config,
    server=st.builds(
        ServerConfig,
        host=words.filter(bool),
        port=st.integers(0, 65535),
        max_message_bytes=st.integers(1, (1 << 31) - 1),
        auth_tokens=st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1), max_size=3).map(
            tuple
        ),
        allow_plaintext_tokens=st.just(True),  # hosts are any words
        drain_seconds=st.floats(0, 1e6),
    ),
    engine=st.builds(
        EngineConfig,
        stages=st.sampled_from(["threads", "inline"]),
        torch_threads=st.integers(0, 64),
        pages=st.integers(0, 1 << 20),
        max_tokens=st.integers(0, 1 << 40),
        **dict.fromkeys(COUNTS, sizes),
    ),
    media=st.builds(MediaConfig, max_pixels=sizes, max_images=st.integers(1, 99)),
    models=st.lists(st.builds(ModelConfig, path=words, name=words), min_size=1, max_size=3).map(tuple),
)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "mmserve.toml"


@given(config=configs)
def test_a_written_config_reads_back_equal(config_file: Path, config: Config) -> None:
    config_file.write_text(written(config), encoding="utf-8")
    assert load(config_file) == config


def test_an_empty_file_is_the_default_config(config_file: Path) -> None:
    config_file.write_text("")
    assert load(config_file) == Config()
    assert Config().models == (ModelConfig(path="bundled"),)


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().engine.page_size = 4  # type: ignore[misc]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*nowhere\.toml"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("content", [b"[server", b"port = ", b'[server]\nhost = "\xff"\n'])
def test_a_file_that_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(path)


def test_an_unknown_table_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown table 'servers'.*server.*engine.*media.*models"):
        from_mapping({"servers": {}})


@pytest.mark.parametrize("table", [*TABLES, "models"])
def test_an_unknown_key_is_refused_with_the_known_ones(table: str) -> None:
    wrong = {"colour": 1}
    with pytest.raises(ConfigError, match=rf"{table}.*has no key 'colour'") as refused:
        from_mapping({table: [wrong] if table == "models" else wrong})
    for field in dataclasses.fields(TABLES.get(table, ModelConfig)):
        assert field.name in str(refused.value)


def test_a_misspelled_key_is_answered_with_the_similar_one() -> None:
    with pytest.raises(ConfigError, match=r"has no key 'prt'; did you mean 'port'\? Known are host, port"):
        from_mapping({"server": {"prt": 1}})


def _of_another_type(default: Any) -> list[Any]:
    values: list[Any] = [True, 3, 2.5, "text", ["a"], [1], {"a": 1}]
    fits = {bool: [True], int: [3], float: [3, 2.5], str: ["text"], tuple: [["a"]]}[type(default)]
    return [v for v in values if not any(v is f or (type(v) is type(f) and v == f) for f in fits)]


@pytest.mark.parametrize(("table", "key", "default"), KEYS, ids=lambda v: v if isinstance(v, str) else None)
def test_a_value_of_another_type_is_refused_with_table_and_key(table: str, key: str, default: Any) -> None:
    kinds = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a string",
        tuple: "a list of strings",
    }
    for value in _of_another_type(default):
        with pytest.raises(ConfigError, match=rf"\[{table}\] {key} must be {kinds[type(default)]}, not"):
            from_mapping({table: {key: value}})


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("value", [3, "text", [1], True])
def test_a_value_where_a_table_belongs_is_refused(table: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=table):
        from_mapping({table: value})


@pytest.mark.parametrize("value", [3, "bundled", {"path": "bundled"}, ["bundled"]])
def test_models_that_are_not_an_array_of_tables_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="models"):
        from_mapping({"models": value})


def test_an_integer_is_good_for_a_float() -> None:
    config = from_mapping({"server": {"drain_seconds": 5}})
    assert config.server.drain_seconds == 5.0
    assert isinstance(config.server.drain_seconds, float)


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"\[engine\] {key} must be at least 1"):
        from_mapping({"engine": {key: value}})


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("server", {"port": 65536, "metrics_port": 65536, "keepalive_seconds": 1e7, "max_message_bytes": 1 << 31}),
        ("server", {"port": -1, "keepalive_seconds": 0.0, "max_message_bytes": 0, "drain_seconds": -1.0}),
        ("server", {"keepalive_seconds": float("nan"), "drain_seconds": float("nan")}),
        ("server", {"keepalive_seconds": float("inf"), "drain_seconds": float("inf")}),
        ("media", {"max_item_bytes": 0, "max_pixels": 0, "max_side": 0, "max_images": -1, "live_bytes": 0}),
        ("media", {"max_video_seconds": float("nan"), "max_video_pixels": -1, "store_bytes": -1}),
        ("encoder_cache", {"token_bytes": -1, "pixel_bytes": -1, "kv_bytes": -1, "disk_bytes": -1}),
    ],
)
def test_a_number_out_of_range_is_refused(table: str, values: dict[str, float]) -> None:
    for key, value in values.items():
        with pytest.raises(ConfigError, match=rf"\[{table}\] {key} must be at (least|most) \d+.*, not {value}"):
            from_mapping({table: {key: value}})


def test_metrics_have_a_port_and_a_host_of_their_own() -> None:
    assert from_mapping({"server": {"metrics_port": 9464}}).server.metrics_host == "127.0.0.1"
    with pytest.raises(ConfigError, match="metrics_port must differ from port"):
        from_mapping({"server": {"port": 9464, "metrics_port": 9464}})
    with pytest.raises(ConfigError, match="metrics_host must not be empty"):
        from_mapping({"server": {"metrics_host": ""}})


@pytest.mark.parametrize("token", ["", "tö", "a\n"])
def test_a_token_that_anybody_or_nobody_has_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match=r"\[server\] auth_tokens must be printable ASCII"):
        from_mapping({"server": {"auth_tokens": ["good", token]}})


def test_no_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[server\] host must not be empty"):
        from_mapping({"server": {"host": ""}})


def test_the_example_has_every_key_with_its_default() -> None:
    path = Path(__file__).parents[2] / "deploy" / "mmserve.toml"
    assert load(path) == Config()
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    (data["models"],) = data["models"]
    for table, kind in {**TABLES, "encoder_cache": EncoderCacheConfig, "models": ModelConfig}.items():
        assert set(data[table]) == {f.name for f in dataclasses.fields(kind)}, table


@pytest.mark.parametrize("key", ["torch_threads", "pages", "max_tokens"])
def test_a_negative_number_where_zero_means_auto_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[engine\] {key}"):
        from_mapping({"engine": {key: -1}})


def test_more_torch_threads_than_any_machine_has_are_refused() -> None:
    accepted = r"torch_threads must be at least 0 \(0 = auto\) and at most 1024, not 100000"
    with pytest.raises(ConfigError, match=accepted):
        from_mapping({"engine": {"torch_threads": 100_000}})


def test_an_unknown_way_to_run_the_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match="stages must be 'threads' or 'inline', not 'processes'"):
        from_mapping({"engine": {"stages": "processes"}})


@pytest.mark.parametrize(
    "server",
    [{"tls_certificate": "a.pem"}, {"tls_key": "a.key"}, {"tls_client_ca": "ca.pem"}],
    ids=lambda s: next(iter(s)),
)
def test_half_a_tls_setting_is_refused(server: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"\[server\] .*tls_"):
        from_mapping({"server": server})
    whole = {"tls_certificate": "a.pem", "tls_key": "a.key", **server}
    assert from_mapping({"server": whole}).server.tls_key == "a.key"


def test_a_config_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one model"):
        from_mapping({"models": []})


@given(configs, st.integers(1, 256))
def test_resolve_leaves_no_auto_and_changes_nothing_that_is_set(config: Config, cores: int) -> None:
    engine = config.engine
    resolved = resolve(engine, cores=cores)
    auto = ("torch_threads", "pages", "max_tokens", "prefill_tokens", "decode_tokens")
    assert dataclasses.replace(resolved, **{key: getattr(engine, key) for key in auto}) == engine
    for key in auto:
        assert getattr(resolved, key) >= 1
        assert getattr(engine, key) in (0, getattr(resolved, key))
    assert resolve(resolved, cores=cores) == resolved
    if not engine.pages:
        assert resolved.pages * engine.page_size >= engine.max_running * resolved.max_tokens


@given(configs, st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_requests_are_as_long_as_the_model_and_memory_allow(config: Config, positions: int, room: int) -> None:
    engine = dataclasses.replace(config.engine, max_tokens=0, pages=0)
    resolved = resolve(engine, positions=positions, room=room)
    assert 1 <= resolved.pages <= max(1, room)
    assert resolved.max_tokens == min(positions, resolved.pages * engine.page_size)
    asked = resolve(dataclasses.replace(engine, max_tokens=positions, pages=room + 1), positions=7, room=3)
    assert (asked.max_tokens, asked.pages) == (positions, room + 1)


@pytest.mark.parametrize(("stages", "workers"), [("threads", 3), ("inline", 1)])
@pytest.mark.parametrize("cores", [1, 2, 3, 4, 7, 8, 64])
def test_auto_threads_of_all_busy_stages_stay_within_the_cores(stages: str, workers: int, cores: int) -> None:
    threads = resolve(EngineConfig(stages=stages), cores=cores).torch_threads
    assert threads == max(1, cores // workers)


def test_resolve_counts_the_cores_of_this_process() -> None:
    assert resolve(EngineConfig()).torch_threads >= 1
    assert resolve(EngineConfig(stages="inline")).torch_threads >= resolve(EngineConfig()).torch_threads


def test_schedulers_are_tables_with_a_class_and_numbers_of_their_own() -> None:
    config = from_mapping({"schedulers": {"refine": {"class": "BlockRefinementScheduler", "threshold": 0.9}}})
    assert config.schedulers == (
        SchedulerConfig(name="refine", kind="BlockRefinementScheduler", numbers={"threshold": 0.9}),
    )
    for wrong, says in (
        ([], "schedulers must be tables"),
        ({"x": 1}, r"\[schedulers.x\] must be a table"),
        ({"x": {"threshold": 1}}, r"\[schedulers.x\] class must be the name"),
    ):
        with pytest.raises(ConfigError, match=says):
            from_mapping({"schedulers": wrong})


def test_graphs_are_auto_or_off() -> None:
    assert EngineConfig().cuda_graphs == "auto"
    assert from_mapping({"engine": {"cuda_graphs": "off"}}).engine.cuda_graphs == "off"
    with pytest.raises(ConfigError, match="cuda_graphs must be 'auto' or 'off', not 'on'"):
        from_mapping({"engine": {"cuda_graphs": "on"}})
