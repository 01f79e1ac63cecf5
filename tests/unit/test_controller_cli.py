"""The controller's commands: options and files become settings; bad input is one clear line."""

from __future__ import annotations

import json
import re
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from controller.admin.status import (
    AlertView,
    AnswersView,
    BreakerView,
    BudgetView,
    ConfidenceView,
    HopView,
    OutcomeView,
    PolicyView,
    ReplicaView,
    Status,
    TierView,
)
from controller.cli import keys, make_settings, parse_upstream, serve, status
from controller.config import Settings, Upstream
from controller.gateway.keys import load_keys
from policy.files import FileError
from policy.outcomes import FAILURE_HTTP

if TYPE_CHECKING:
    from collections.abc import Iterator

    import click

HERE = "http://127.0.0.1:9"
"""Nobody listens on the discard port."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defaults such as keys.yaml are looked for in a folder of their own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def run(command: click.Command, *words: object, **environment: str) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], env=environment)


# upstreams


def test_an_upstream_is_a_url_and_what_its_server_does_not_say() -> None:
    text = (
        "http://10.0.0.7:8000, profile=h100-sxm/qwen3-8b,domain=host0/card3,label=vllm=0.32,"
        "label=zone=a,version=v2,max_num_seqs=64"
    )
    raw = parse_upstream(text)
    assert msgspec.convert(raw, Upstream) == Upstream(
        "http://10.0.0.7:8000",
        profile="h100-sxm/qwen3-8b",
        domain="host0/card3",
        labels=("vllm=0.32", "zone=a"),
        version="v2",
        max_num_seqs=64,
    )
    assert parse_upstream(HERE) == {"url": HERE}


@pytest.mark.parametrize(
    ("upstream", "said"),
    [
        (f"{HERE},profle=x", "did you mean profile"),
        (f"{HERE},profile", "NAME=VALUE"),
        (f"{HERE},profile=", "NAME=VALUE"),
        (f"{HERE},version=a,version=b", "twice"),
        (f"{HERE},max_num_seqs=many", "'many'"),
        (f"{HERE},max_num_seqs=-1", "'-1'"),
        (f"{HERE},profile=h100-sxm/qwen3-8x", "qwen3-8x"),
        ("10.0.0.7:8000", "10.0.0.7:8000"),
        ("ftp://host:1", "ftp://host:1"),
        ("http://", "http://"),
        ("http://host:99999", "99999"),
        ("http://host:8000/v1", "paths such as /v1 are added"),
        ("http://user:hunter2@host:8000", "password"),
        ("", "''"),
    ],
)
def test_a_bad_upstream_is_one_line(upstream: str, said: str) -> None:
    result = run(serve, "--check", "--upstream", upstream)
    assert result.exit_code == 2
    assert said in result.output
    assert "hunter2" not in result.output
    assert len(result.output.strip().splitlines()) == 1


# settings


def test_options_go_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "controller.yaml"
    file.write_text(
        "schema: 1\n"
        "port: 9000\n"
        "observe: true\n"
        "policy: throughput\n"
        "upstreams:\n"
        f"  - {HERE},domain=a\n"
        "  - {url: http://127.0.0.1:10, labels: [x=y]}\n"
        "features: {extras: false}\n"
        "limits: {open_most: 7, comment_s: 5}\n"
    )
    options: dict[str, Any] = {
        "port": 0, "features": {"confidence": True}, "limits": {"open_most": 9},
    }  # fmt: skip
    settings = make_settings(file, options)
    assert settings.port == 0
    assert settings.admin_port == Settings(upstreams=()).admin_port
    assert settings.observe
    assert settings.policy == "throughput"
    assert settings.upstreams[0] == Upstream(HERE, domain="a")
    assert settings.upstreams[1].labels == ("x=y",)
    assert settings.features == msgspec.structs.replace(
        settings.features, usage=True, extras=False, confidence=True
    )
    assert (settings.limits.open_most, settings.limits.comment_s) == (9, 5.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prt: 1\n", "did you mean port"),
        ("features: {usge: true}\n", "did you mean usage"),
        ("limits: {open_mst: 1}\n", "did you mean open_most"),
        ("upstreams: [{url: 'http://a:1', profle: x}]\n", "did you mean profile"),
        ("port: 70000\n", "70000"),
        ("port: high\n", "'high'"),
        ("port: 1\nport: 2\n", "twice"),
        ("schema: 2\n", "schema 2"),
        ("span_share: 1.5\n", "1.5"),
        ("sample_share: 1.5\n", "1.5"),
        ("features: 5\n", "5"),
        ("upstreams: 5\n", "upstreams"),
        ("upstreams: [5]\n", "upstreams"),
        ("limits: {body_bytes_most: 3}\n", "below 1024"),
        ("port: 8081\n", "8081"),
        ("webhook: hook\n", "http://10.0.0.7:8000/some/path"),
        ("admin_token: abc\n", "3 characters"),
        ("- 1\n", "mapping"),
        ("a: [\n", "YAML"),
    ],
)
def test_a_bad_file_is_one_line_with_file_key_and_value(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "controller.yaml"
    more = "" if "upstreams" in text or text.startswith("-") else f"upstreams: ['{HERE}']\n"
    file.write_text(more + text)
    with pytest.raises(FileError, match=r"controller\.yaml") as caught:
        make_settings(file, {})
    assert said in str(caught.value)
    result = run(serve, "--check", "--config", file)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_a_pattern_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "redact"
    file.write_text("# ours\norder = ORD-(a+)+\n", encoding="utf-8")
    words = ("--check", "--upstream", HERE, "--sample-share", "0.1", "--redact")
    result = run(serve, *words, file)
    assert result.exit_code == 2
    assert "redact, line 2: order repeats" in result.output
    result = run(serve, *words, tmp_path / "missing")
    assert result.exit_code == 2
    assert "missing: No such file" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--upstream"),
        (("--upstream", HERE, "--policy", "stable", "--gpu-policy", "fifo"), "give one"),
        (("--upstream", HERE, "--policy", "stabel"), "did you mean stable"),
        (("--upstream", HERE, "--gpu-policy", "stabel"), "did you mean stable"),
        (("--upstream", HERE, "--policy", "nowhere.yaml"), "nowhere.yaml"),
        (("--upstream", HERE, "--upstream", f"{HERE}/"), "twice"),
        (("--upstream", HERE, "--port", "-1"), "-1"),
        (("--upstream", HERE, "--limit", "open_mst=1"), "did you mean open_most"),
        (("--upstream", HERE, "--limit", "open_most=lots"), "'lots'"),
        (("--upstream", HERE, "--limit", "open_most"), "open_most"),
        (("--upstream", HERE, "--limit", "open_most=0"), "below 1"),
        (("--upstream", HERE, "--limit", "comment_s=-3"), "comment_s"),
        (("--upstream", HERE, "--keys", "nowhere.yaml"), "nowhere.yaml"),
        (("--upstream", HERE, "--config", "nowhere.yaml"), "nowhere.yaml"),
        (("--upstream", HERE, "--admin-token-file", "nowhere"), "nowhere"),
        (("--upstream", HERE, "--span-share", "2"), "span_share"),
    ],
)
def test_bad_options_exit_2_with_one_line(words: tuple[object, ...], said: str) -> None:
    result = run(serve, "--check", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_check_says_what_is_there_and_needs_no_server_up(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    assert run(keys, "add", "support", "--file", file).exit_code == 0
    cards = {"data": [{"id": "qwen3-8b", "max_model_len": 4096}]}
    with answering(json.dumps(cards).encode(), public=True) as url:
        result = run(
            serve, "--check", "--gpu-policy=stable", "--upstream", HERE, "--upstream", url,
            "--keys", file,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "policy   stable (tiered): valid" in result.output
    assert f"upstream {url}: serves qwen3-8b, version qwen3-8b, " in result.output
    assert f"upstream {HERE}: does not answer now" in result.output
    assert "keys     1 in" in result.output


def test_check_says_whether_step_records_are_there(tmp_path: Path) -> None:
    (tmp_path / "steps-1.ab12cd34-0.jsonl").touch()
    given = [(HERE, tmp_path, "1 files of step records"), (HERE, tmp_path / "typo", "(yet)")]
    for url, folder, said in given:
        result = run(serve, "--check", "--upstream", f"{url},steps={folder}")
        assert result.exit_code == 0, result.output
        (line,) = [each for each in result.output.splitlines() if each.startswith("  steps ")]
        assert said in line


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (b"{}", 501, "/v1/models answers 501"),
        (b"hello", 200, "is no list of models"),
        (b'{"data": [{"id": "who-knows"}]}', 200, "whose step times are not known"),
    ],
)
def test_check_says_which_server_cannot_be_used(body: bytes, code: int, said: str) -> None:
    with answering(body, code, public=True) as url:
        result = run(serve, "--check", "--upstream", url)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert f"{url}: cannot be used as it is" in result.output.splitlines()[-1]
    assert "are valid" not in result.output


@pytest.mark.parametrize("way", ["file", "variable"])
def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path, way: str) -> None:
    file = tmp_path / "token"
    file.write_text("hunter2\n")
    if way == "file":
        result = run(serve, "--check", "--upstream", HERE, "--admin-token-file", file)
    else:
        result = run(serve, "--check", "--upstream", HERE, TWINKEEL_ADMIN_TOKEN="hunter2")
    assert result.exit_code == 2
    assert "7 characters" in result.output
    assert "hunter2" not in result.output


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = run(serve, "--upstream", HERE)
    assert result.exit_code == 2
    assert "aiohttp is not installed" in result.output
    assert "twinkeel[live]" in result.output


# keys


def test_a_key_is_printed_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    result = run(keys, "add", "support", "--file", file, "--sla", "P0", "--expires", "2999-01-31")
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert key not in file.read_text()
    tenant = load_keys(file).check(f"Bearer {key}")
    assert tenant is not None
    assert (tenant.name, tenant.sla) == ("support", "P0")
    listed = run(keys, "list", "--file", file)
    assert "support until 2999-01-31 P0" in listed.output
    assert key not in listed.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "../evil"), "'../evil' can name no tenant: give it"),
        (("add", "support", "--expires", "2001-01-31"), "2001-01-31"),
        (("list",), "keys.yaml"),
    ],
)
def test_bad_keys_exit_2(words: tuple[str, ...], said: str) -> None:
    result = run(keys, *words)
    assert result.exit_code == 2
    assert said in result.output


def test_a_keys_file_without_keys_would_shut_everyone_out(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("schema: 1\nkeys: []\n")
    result = run(serve, "--check", "--upstream", HERE, "--keys", file)
    assert result.exit_code == 2
    assert "twinkeel keys add" in result.output


# status

TOKEN = "t0ken-of-a-good-length"


@contextmanager
def answering(body: bytes, code: int = 200, public: bool = False) -> Iterator[str]:
    """A server that answers all that comes with ``TOKEN``, or to ``public`` all, with ``body``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            self.send_response(code if known or public else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def example() -> Status:
    return Status(
        state="serving",
        observe=True,
        uptime_s=75.0,
        policy=PolicyView("fifo", "fifo", "0123456789abcdef"),
        open_requests=3,
        settled_requests=41,
        lost_requests=2,
        refused_events=1,
        replicas=(
            ReplicaView(0, "a:1", "http://a:1", True, "in", "", 2, 2, 0, 123, 40, 999, 0.25,
                        ("qwen",), "v1", "host0"),
            ReplicaView(1, "b:1", "http://b:1", False, "ejected", "http_5xx", 0, -1, -1, -1, -1, 0,
                        -1.0),
        ),
        tiers=(TierView("turbo", 1, 2, 30, 120.5, 812.25, 800),),
        hops=(HopView("queue", 30, 1.5, 7.25), HopView("rest", 0, -1.0, -1.0)),
        breakers=(BreakerView("errors model=qwen", "open", "share", 7, 90, 2000, 1500),),
        outcomes=(OutcomeView("answered", "", 40), OutcomeView("shed", "deadline", 1)),
        alerts=(AlertView(1_700_000_000.0, "replica 1", "ejected [x]", "moved", {"bad": 7}),),
        scaling={},
        observed={"would shed: deadline": 4, "queue_ms_p95": 456, "off": 0},
        shadow=PolicyView("stable", "tiered", "fedcba9876543210"),
        answers=AnswersView(
            ConfidenceView(40, 812, 5), {"match": 3, "skipped_stream": 2}, 4,
            BudgetView(1200, 4000, 20),
        ),
    )  # fmt: skip


def test_status_shows_tables_or_what_the_controller_said(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    body = msgspec.json.encode(example())
    with answering(body) as url:
        tables = run(status, "--admin", url, "--token-file", file)
        raw = run(status, "--admin", url, "--json", TWINKEEL_ADMIN_TOKEN=TOKEN)
    assert tables.exit_code == 0, tables.output
    for said in (
        "policy fifo (fifo", "in shadow stable (tiered", "observing only", "in queue, p95",
         "ejected: http_5xx", "812.2", "800", "7 / 90",
        "errors model=qwen", "deadline", "ejected [x]", "bad 7", "would shed: deadline",
        "1 events were refused", "40 scored, mean confidence 0.812, 5 too low", "4 second runs",
        "match 3, skipped_stream 2",
    ):  # fmt: skip
        assert said in tables.output, said
    assert json.loads(raw.output) == json.loads(body)
    assert "off" not in tables.output


def test_status_finds_a_controller_by_its_data_folder(tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text(TOKEN)
    with answering(msgspec.json.encode(example())) as url:
        (tmp_path / "admin.url").write_text(f"{url}\n")
        found = run(status, "--data", tmp_path)
    assert found.exit_code == 0, found.output
    (tmp_path / "admin.url").write_text(HERE)
    gone = run(status, "--data", tmp_path)
    assert gone.exit_code == 2
    assert f"{HERE}/status: no controller answers" in gone.output


def test_status_of_what_cannot_be_asked_exits_2(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("another-token-of-good-length")
    with answering(b"{}") as url:
        wrong = run(status, "--admin", url, "--token-file", file)
        strange = run(status, "--admin", url, TWINKEEL_ADMIN_TOKEN=TOKEN)
    nobody = run(status, "--admin", HERE, TWINKEEL_ADMIN_TOKEN=TOKEN)
    without = run(status, "--admin", HERE, TWINKEEL_ADMIN_TOKEN="")
    bad = run(status, "--admin", "file:///etc/passwd", TWINKEEL_ADMIN_TOKEN=TOKEN)
    for result, said in (
        (wrong, "token is not"), (strange, "this version"), (nobody, "no controller answers"),
        (without, "TWINKEEL_ADMIN_TOKEN"), (bad, "file:///etc/passwd"),
    ):  # fmt: skip
        assert result.exit_code == 2, result.output
        assert said in result.output
        assert "Traceback" not in result.output


# What is shipped for containers

DEPLOY = Path(str(resources.files("controller"))) / "deploy"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def test_the_shipped_settings_can_be_used(tmp_path: Path) -> None:
    settings = make_settings(DEPLOY / "controller.yaml", {})
    assert [upstream.url for upstream in settings.upstreams] == [
        "http://vllm-0:8000", "http://vllm-1:8000",
    ]  # fmt: skip
    config, fleet = documents("kubernetes/settings.yaml")
    file = tmp_path / "controller.yaml"
    file.write_text(config["data"]["controller.yaml"])
    kubernetes = make_settings(file, {})
    (in_fleet,) = fleet["data"]
    assert Path(kubernetes.fleet).name == in_fleet
    stateful, *services = documents("kubernetes/controller.yaml")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": kubernetes.port, "admin": kubernetes.admin_port}
    grace_s = pod["terminationGracePeriodSeconds"]
    assert grace_s > kubernetes.drain_s + kubernetes.unready_s
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["data"] == kubernetes.data
    assert {service["metadata"]["name"] for service in services} == {"twinkeel", "twinkeel-admin"}
    listed = documents("kubernetes/kustomization.yaml")[0]["resources"]
    there = {path.name for path in (DEPLOY / "kubernetes").iterdir() if path.is_file()}
    assert {*listed, "kustomization.yaml"} == there


def test_the_commands_of_the_shipped_files_are_the_ones_there_are(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    (compose,) = documents("compose.yaml")
    command, *words = compose["services"]["controller"]["command"]
    assert command == "serve"
    words = [word.replace("/run/secrets/admin-token", str(token)) for word in words]
    given = [word for word in words if not word.startswith("--upstream")]
    result = run(serve, "--check", *given, "--upstream", HERE)
    assert result.exit_code == 0, result.output
    upstreams = [word.partition("=")[2] for word in words if word.startswith("--upstream")]
    assert [parse_upstream(text)["domain"] for text in upstreams] == ["server-0", "server-1"]
    assert yaml.safe_load(compose["configs"]["prometheus"]["content"])["rule_files"]
    docker = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert json.loads(docker.splitlines()[-1].removeprefix("CMD "))[0] == serve.name


# The operators' page

PAGE = (Path(__file__).parents[2] / "docs" / "controller.md").read_text(encoding="utf-8")


def test_the_page_has_every_failure_with_its_status() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", PAGE, re.MULTILINE)
    told = {code: status for codes, status in rows for code in re.findall(r"`(\w+)`", codes)}
    for kind, code in FAILURE_HTTP.items():
        assert told[kind] == ("the server's own" if kind == "rejected" else str(code)), kind


def test_the_page_and_the_help_have_the_same_options() -> None:
    options = {name for parameter in serve.params for name in parameter.opts}
    rows = re.findall(r"^\| (`--[^|]+(?:\\\|[^|]+)*) \|", PAGE, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"--[\w-]+", row)} == options


def test_every_file_that_the_page_points_to_is_there() -> None:
    links = re.findall(r"\]\((\.\./[^)#]+)\)", PAGE)
    assert links
    for link in links:
        assert (Path(__file__).parents[2] / "docs" / link).resolve().is_file(), link
