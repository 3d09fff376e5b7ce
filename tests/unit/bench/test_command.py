"""The command against a real HTTP server that speaks the completions API."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headstart.bench.command import run
from headstart.bench.options import (
    LengthOptions,
    LoadOptions,
    Options,
    OrderOptions,
    PrefixOptions,
    ReportOptions,
    TargetOptions,
)
from headstart.bench.target import Address, connect, open_http
from headstart.cli import BenchCommand, parse
from tests.support.bench_targets import VirtualTime, events, token, usage


class Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        card = {"id": "m", "owned_by": self.server.owner, "max_model_len": 512}
        kv = {"kv_dtype": "float16", "page_size": 16}
        workers = [{"role": role, "kv": kv, "capacity_tokens": 99} for role in ("prefill", "decode")]
        self.reply(200, json.dumps({"data": [card], "workers": workers}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        self.server.seen.append((self.path, body))
        if self.path != "/v1/completions":
            self.reply(self.server.flush_status, b"{}")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_tokens = body["max_tokens"] - self.server.missing
        for index in range(num_tokens):
            self.chunk(events(token(index)))
        self.chunk(events(usage(len(body["prompt"]), num_tokens), b"[DONE]"))
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def reply(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(owner="vllm", flush_status=200, missing=0):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    server.owner, server.flush_status, server.missing, server.seen = owner, flush_status, missing, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def small(url, tmp_path, output_len=1):
    """Answers of one token need no time between tokens, which a busy machine may not leave."""
    return Options(
        prefix=PrefixOptions(
            gsp_num_groups=2, gsp_prompts_per_group=2, gsp_system_prompt_len=32, gsp_output_len=output_len
        ),
        order=OrderOptions(prefix_share=(0.0, 0.5)),
        load=LoadOptions(max_concurrency=(1, 2)),
        target=TargetOptions(base_url=url),
        output=ReportOptions(output_file=str(tmp_path / "r.json"), plots=str(tmp_path / "plots")),
    )


def test_every_combination_is_measured_after_a_flush_and_a_warm_up(tmp_path, capsys):
    with serving() as (server, url):
        assert run(small(url, tmp_path)) == 0
    paths = [path for path, _ in server.seen]
    assert paths.count("/flush_cache") == 4
    assert paths[:2] == ["/v1/completions", "/flush_cache"]
    assert paths.count("/v1/completions") == 4 * (1 + 2 + 4)
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(row["prefix_share"], row["max_concurrency"], row["completed"]) for row in report["runs"]] == [
        (0.0, 1, 4),
        (0.0, 2, 4),
        (0.5, 1, 4),
        (0.5, 2, 4),
    ]
    assert all(row["cold"]["num_first_turns"] == 2 and row["flushed"] for row in report["runs"])
    assert (tmp_path / "plots" / "throughput.svg").exists()
    assert "Mean cold TTFT (ms)" in capsys.readouterr().out


def test_two_servers_get_the_same_work_in_turns_over_three_seeds_and_a_ratio(tmp_path, capsys):
    with serving() as (one, url), serving() as (two, other):
        options = Options(
            workload="no-reuse",
            length=LengthOptions(num_prompts=2, random_input_len=20, random_output_len=1),
            target=TargetOptions(base_url=url, label="one", against=other, against_label="two"),
        )
        assert run(options) == 0

    def sent(server):
        return sorted(json.dumps(body, sort_keys=True) for path, body in server.seen if path == "/v1/completions")

    assert sent(one) == sent(two)
    assert len(sent(one)) == 3 * (1 + 1 + 2)
    assert "B / A" in capsys.readouterr().out


def test_fewer_tokens_than_asked_for_fail_the_command(tmp_path, capsys):
    with serving(missing=1) as (_, url):
        assert run(small(url, tmp_path, output_len=2)) == 1
    assert "fewer than the 2" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    "too_long", [{"random_input_len": 508}, {"num_turns": 4, "random_input_len": 300, "turn_len": 70}]
)
def test_requests_that_the_server_cannot_take_are_refused_before_any_is_sent(too_long, capsys):
    lengths = {"num_prompts": 1, "num_turns": 1, "random_output_len": 5} | too_long
    with serving() as (server, url):
        options = Options("multi-turn", length=LengthOptions(**lengths), target=TargetOptions(base_url=url))
        assert run(options) == 1
    assert "512 are served" in capsys.readouterr().err
    assert not server.seen


def test_a_server_that_cannot_flush_is_measured_and_said_so(tmp_path):
    with serving(flush_status=404) as (_, url):
        assert run(small(url, tmp_path)) == 0
    assert not any(row["flushed"] for row in json.loads((tmp_path / "r.json").read_text())["runs"])


def test_a_model_that_is_not_served_is_named_before_anything_is_sent(capsys):
    with serving() as (server, url):
        assert run(Options(target=TargetOptions(base_url=url, model="gpt-4"))) == 1
    assert capsys.readouterr().err == f"headstart bench: {url} serves no model 'gpt-4'; it serves m\n"
    assert not server.seen


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_the_one_that_clients_of_the_api_are_given(ending, tmp_path):
    with serving() as (server, url):
        assert run(small(url + ending, tmp_path)) == 0
    assert {path for path, _ in server.seen} == {"/v1/completions", "/flush_cache"}


def test_no_server_is_a_message(capsys):
    assert run(Options(target=TargetOptions(base_url="http://127.0.0.1:9"))) == 1
    assert "does not name a model" in capsys.readouterr().err


@pytest.mark.parametrize(("owner", "returns_ids"), [("headstart", True), ("vllm", True), ("someone", False)])
def test_token_ids_are_asked_for_where_the_server_knows_them(owner, returns_ids):
    async def go(url):
        address = Address(url)
        async with open_http(address) as http:
            target = await connect(address, http, VirtualTime())
            return target

    with serving(owner) as (_, url):
        target = asyncio.run(go(url))
    assert target.client.returns_ids is returns_ids
    assert ("dtype" in target.facts) is (owner == "headstart")


def test_comparing_two_reports_measures_nothing(tmp_path, capsys):
    with serving() as (_, url):
        assert run(small(url, tmp_path)) == 0
    path = str(tmp_path / "r.json")
    assert run(Options(output=ReportOptions(compare=(path, path)))) == 0
    assert "1.000" in capsys.readouterr().out
    assert run(Options(output=ReportOptions(compare=(path,)))) == 1


def test_the_command_line_reads_bench_servings_names():
    command = parse(
        [
            "bench",
            "trace",
            "f.jsonl",
            "--open-loop",
            "--speed",
            "2",
            "--max-concurrency",
            "30",
            "128",
            "--num-seeds",
            "3",
        ]
    )
    assert isinstance(command, BenchCommand)
    assert (command.workload, command.trace_file, command.trace.open_loop) == ("trace", "f.jsonl", True)
    assert command.load.max_concurrency == (30, 128)
    shared = parse(["bench", "--gsp-num-groups", "80", "--gsp-range-ratio", "0.5", "--gsp-group-distribution", "zipf"])
    assert isinstance(shared, BenchCommand)
    assert (shared.prefix.gsp_num_groups, shared.order.gsp_group_distribution) == (80, "zipf")
