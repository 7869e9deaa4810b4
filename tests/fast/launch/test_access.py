"""From flags to what the gate is made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_esft.errors import ConfigError
from sgl_esft.ports import pick_free_port
from sgl_esft_launch import access, console, elastic_serve, flags, serve, server
from sgl_esft_launch.access import AccessPlan
from sgl_esft_launch.resolved import check_resolved

KEY = "-client-key-0123456789"
ADMIN = "admin-key-0123456789"
TENANT = "tenant-key-0123456789"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    tenant = {"name": "tenant", "key": TENANT, "adapters": ["math"], "base_model": False}
    path.write_text(json.dumps({"keys": [tenant, {"name": "all", "key": KEY}]}))
    path.chmod(0o600)
    return path


def make(*argv: str, weave: bool = True, **environment: str) -> AccessPlan:
    parsed, rest = flags.parse(argv)
    return access.plan_access(
        parsed.access, parsed.host, rest, weave=weave, environment=environment
    )


def test_defaults() -> None:
    plan = make()
    assert len(plan.policy.keys) == 0
    assert plan.inner_key is None
    assert plan.policy.rules.max_bytes == 2 << 20
    assert 0 < plan.policy.body_timeout_s < plan.policy.request_timeout_s < 7200
    assert access.argv_of(plan) == ()
    assert not plan.policy.rules.takes_logit_processors
    assert not plan.policy.rules.takes_templates
    assert make("--trust-request-chat-template").policy.rules.takes_templates
    assert not plan.policy.rules.takes_media
    assert not plan.policy.rules.takes_stop_regex
    assert make("--allow-stop-regex").policy.rules.takes_stop_regex


def test_keys_are_kept_apart_where_there_are_keys() -> None:
    assert not make(f"--api-key={KEY}").isolates_prefix_cache
    assert make(f"--api-key={KEY}", "--isolate-prefix-cache").isolates_prefix_cache
    with pytest.raises(ConfigError, match="there are no keys: give --api-keys-file"):
        make("--isolate-prefix-cache")


def test_every_flag(keys_file: Path) -> None:
    plan = make(
        *("--api-keys-file", str(keys_file), "--admin-key-env", "ADMIN_KEY"),
        *("--api-key", "one-more-key-0123456789", "--max-body-bytes", "8MiB"),
        *("--body-timeout", "2.5", "--request-timeout", "60"),
        *("--allowed-origins", "https://a", "https://b"),
        *("--enable-route", "/start_profile", "--enable-route=/stop_profile"),
        "--enable-custom-logit-processor",
        ADMIN_KEY=ADMIN,
    )
    assert [plan.policy.keys.find(k) is not None for k in (KEY, TENANT, ADMIN)] == [True] * 3
    assert plan.policy.keys.has_admin
    assert plan.policy.rules.max_bytes == 8 << 20
    assert plan.policy.rules.takes_logit_processors
    assert (plan.policy.body_timeout_s, plan.policy.request_timeout_s) == (2.5, 60)
    assert plan.policy.allowed_origins == ("https://a", "https://b")
    assert plan.policy.table.enabled == {"/start_profile", "/stop_profile"}
    assert make("--max-body-bytes", "1000").policy.rules.max_bytes == 1000


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-1", "localhost.example", ""])
def test_no_other_host_without_keys(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-keys-file or --api-key"):
        make("--host", host)
    assert len(make("--host", host, f"--api-key={KEY}").policy.keys) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert make("--host", host).inner_key is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--api-key", "short"], "--api-key: a key has 16 to 256"),
        (["--admin-api-key", "short"], "--admin-api-key: a key has 16 to 256"),
        ([f"--api-key={KEY}", f"--admin-api-key={KEY}"], "have the same key"),
        (["--admin-key-env", "NOT_SET"], "--admin-key-env NOT_SET: the variable is not set"),
        (["--api-keys-file", "nothing.json"], "cannot read nothing.json"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--max-body-bytes", "2mb"], "--max-body-bytes"),
        (["--request-timeout", "0"], "--request-timeout 0: must be a finite time"),
        (["--request-timeout", "inf"], "--request-timeout inf: must be"),
        (["--body-timeout", "nan"], "--body-timeout nan: must be"),
        (["--body-timeout", "-1"], "--body-timeout -1: must be"),
    ],
)
def test_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(*argv)
    assert KEY not in str(caught.value)


def test_keys_for_some_adapters_need_adapters(keys_file: Path) -> None:
    with pytest.raises(ConfigError, match="--no-esft has no adapters"):
        make("--api-keys-file", str(keys_file), weave=False)


@pytest.mark.parametrize("weave", [True, False])
@pytest.mark.parametrize(
    "switch",
    ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "DUMPER_SERVER_PORT"],
)
def test_a_switch_that_opens_another_door_is_refused(switch: str, weave: bool) -> None:
    for value in ("1", "True", "y", "what"):
        with pytest.raises(ConfigError, match=f"{switch}: .*; unset it"):
            make(weave=weave, **{switch: value})
    for value in ("", "0", "False", "n"):
        make(weave=weave, **{switch: value})


@pytest.mark.parametrize("weave", [True, False])
@pytest.mark.parametrize(
    ("flag", "field", "value", "default"),
    [
        ("--grpc-port", "grpc_port", 5000, None),
        ("--disaggregation-mode", "disaggregation_mode", "prefill", "null"),
        ("--enable-http2", "enable_http2", True, False),
        ("--tokenizer-worker-num", "tokenizer_worker_num", 2, 1),
    ],
)
def test_a_flag_that_opens_another_door_is_refused(
    flag: str, field: str, value: Any, default: Any, weave: bool
) -> None:
    """By its name, and by its value however that has come."""
    for argv in ([flag, str(value)], [f"{flag}={value}"]):
        with pytest.raises(ConfigError, match=f"{flag}: .*; leave it out"):
            make(*argv, weave=weave)
    (door,) = (each for each in access.needed("127.0.0.1") if each.field == field)
    check_resolved(SimpleNamespace(**{field: default}), (door,))
    with pytest.raises(ConfigError, match=f"{flag} .* cannot be used"):
        check_resolved(SimpleNamespace(**{field: value}), (door,))


def test_nothing_of_the_plan_shows_a_key(keys_file: Path) -> None:
    argv = ["--api-keys-file", str(keys_file), "--admin-api-key", ADMIN]
    parsed, _ = flags.parse(argv)
    plan = make(*argv)
    for secret in (KEY, TENANT, ADMIN, plan.inner_key.value):
        assert secret not in f"{parsed!r} {plan!r}"


def test_sglang_knows_the_inner_key_only() -> None:
    plan = make(f"--api-key={KEY}")
    value = plan.inner_key.value
    assert access.argv_of(plan) == (f"--api-key={value}", f"--admin-api-key={value}")
    ours = {"api_key": value, "admin_api_key": value, "enable_response_store": False}
    access.check_keys(SimpleNamespace(**ours), plan)
    with pytest.raises(ConfigError, match="--enable-response-store keeps answers for whoever"):
        access.check_keys(SimpleNamespace(**ours | {"enable_response_store": True}), plan)
    access.check_keys(SimpleNamespace(api_key=None, admin_api_key=None), make())
    for api_key, admin in ((value, KEY), (KEY, value), (None, value)):
        with pytest.raises(ConfigError, match="in full, on the command line") as caught:
            access.check_keys(SimpleNamespace(api_key=api_key, admin_api_key=admin), plan)
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="write --api-key in full"):
        access.check_keys(SimpleNamespace(api_key=KEY, admin_api_key=None), make())


def test_children_do_not_inherit_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN_KEY", ADMIN)
    plan = make("--admin-key-env", "ADMIN_KEY", ADMIN_KEY=ADMIN)
    access.forget(plan)
    assert "ADMIN_KEY" not in os.environ


def test_a_name_in_the_keys_file_that_no_adapter_has_is_warned_of(
    keys_file: Path,
) -> None:
    ring = make("--api-keys-file", str(keys_file)).policy.keys
    assert list(access.unknown_adapters(ring, {"math", "law"})) == []
    (line,) = access.unknown_adapters(ring, {"maths", "law"})
    assert line.startswith("key 'tenant' may use 'math' (did you mean 'maths'?): no adapter has")
    (line,) = access.unknown_adapters(ring, ())
    assert line.startswith("key 'tenant' may use 'math': no adapter has the name now")


@pytest.mark.parametrize("elastic", [[], ["--elastic"]])
def test_the_warning_is_a_line_at_start(
    elastic: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(serve, "serve", lambda launch: 0)
    monkeypatch.setattr(elastic_serve, "serve", lambda planned: 0)
    monkeypatch.setattr(console, "begin", lambda argv: None)
    listed = {"name": "team", "key": TENANT, "adapters": ["caeser", "sum", "below"]}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [listed]}))
    (tmp_path / "keys.json").chmod(0o600)
    (tmp_path / "root" / "below").mkdir(parents=True)
    (tmp_path / "root" / "below" / "expert_cfg.json").touch()
    argv = ["--api-keys-file", str(tmp_path / "keys.json"), "--port", str(pick_free_port())]
    argv += ["--adapter-root", str(tmp_path / "root")]
    assert server.main([*argv, *elastic]) == 0
    assert capsys.readouterr().err == (
        "[sgl-esft] warning: key 'team' may use 'caeser' (did you mean 'caesar'?): no adapter has "
        "the name now; correct the keys file, or load one of that name\n"
    )
