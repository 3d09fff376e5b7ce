"""Real processes die, clients leave, workers come and go: every request ends well and every page comes back."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from cluster import DEMO, START_S, TINY_FLAGS, Cluster, free_ports, until
from load import same_greedy
from sharing import serve_until_each_works


@pytest.fixture(scope="module")
def cluster(remote: Cluster) -> Cluster:
    return remote


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


def test_killing_the_prefill_worker_under_load_loses_no_request_and_its_successor_is_used(cluster: Cluster) -> None:
    asked = prompts(8, 700, seed=20)
    before = cluster.worker("prefill-0")["incarnation"]
    with ThreadPoolExecutor(len(asked)) as pool:
        with cluster.stopped("prefill-0"):
            running = [pool.submit(cluster.complete, prompt, 24) for prompt in asked]
            until(
                lambda: cluster.worker("decode-0")["open_choices"] == len(asked), "every request at its decode worker"
            )
        cluster.kill("prefill-0")
        answers = [future.result(timeout=120) for future in running]
    cluster.wait_until_free()
    until(
        lambda: cluster.alive("prefill") and cluster.worker("prefill-0")["incarnation"] > before, "a restart", START_S
    )
    references = [cluster.complete(prompt, 24, logprobs=2) for prompt in asked]
    assert all(same_greedy(answer, reference) for answer, reference in zip(answers, references, strict=True))
    fresh = prompts(1, 200, seed=21)[0]
    assert until(
        lambda: (
            cluster.complete([*fresh, *prompts(1, 3, seed=id(fresh))[0]], 2)["usage"]["headstart"]["bytes_moved"]
            or fresh.reverse()
        ),
        "use of the restarted worker",
    )


def test_a_client_that_leaves_mid_stream_gives_its_pages_back(cluster: Cluster) -> None:
    body = {"model": DEMO, "prompt": prompts(1, 50, seed=30)[0], "max_tokens": 7000, "ignore_eos": True, "stream": True}
    num_before = cluster.total("decode-0", "output_tokens")
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert cluster.worker("decode-0")["open_choices"] == 1
    cluster.wait_until_free()
    assert cluster.total("decode-0", "output_tokens") < num_before + 7000, "nobody told the worker"


def test_a_client_that_leaves_during_prefill_frees_both_sides(cluster: Cluster) -> None:
    body = {"model": DEMO, "prompt": prompts(1, 7000, seed=31)[0], "max_tokens": 4, "stream": True}
    request = subprocess.Popen(
        [
            "curl",
            "-sN",
            f"http://127.0.0.1:{cluster.port}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            "@-",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert request.stdin is not None
    with cluster.stopped("prefill-0"):
        request.stdin.write(json.dumps(body).encode())
        request.stdin.close()
        until(lambda: cluster.worker("decode-0")["open_choices"] == 1, "the request at its decode worker")
    request.kill()
    request.wait()
    cluster.wait_until_free()


def test_workers_started_by_hand_join_and_leave(cluster: Cluster) -> None:
    flags = (*TINY_FLAGS, "--local-prefill-tokens", "0")
    extra = [cluster.join("prefill", "prefill-hand", *flags), cluster.join("decode", "decode-hand", *flags)]
    cluster.wait_for_workers(2, 2)
    answers = serve_until_each_works(cluster, ["decode-hand"], seed=40)
    assert all(len(answer["choices"][0]["token_ids"]) == 16 for answer in answers)
    for process in extra:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=START_S) == 0
    cluster.wait_for_workers(1, 1)
    assert len(cluster.complete(prompts(1, 80, seed=41)[0], 4)["choices"][0]["token_ids"]) == 4


def test_a_name_that_runs_already_is_refused(cluster: Cluster) -> None:
    process = cluster.join("prefill", "prefill-0", *TINY_FLAGS)
    assert process.wait(timeout=START_S) == 4
    del cluster.joined["prefill-0"]


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_a_taken_port_is_one_clear_line_before_anything_starts(cluster: Cluster, flag: str) -> None:
    port = cluster.port if flag == "--port" else cluster.control_port
    free = {"--port": "--control-port", "--control-port": "--port"}[flag]
    command = [sys.executable, "-m", "headstart.cli", "serve", flag, str(port), free, str(free_ports()[0])]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        f"headstart: port {port} on 127.0.0.1 is taken by another process; choose another with {flag}"
    ]


@pytest.mark.full
@pytest.mark.behaviour("H8")
def test_eight_workers_of_one_host_start_at_once_and_each_serves(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, *TINY_FLAGS, "--local-prefill-tokens", "0", "--prefill", "4", "--decode", "4")
    try:
        cluster.wait_until_ready()
        workers = cluster.state()["workers"]
        assert len({worker["peer_address"] for worker in workers if worker["role"] == "prefill"}) == 4
        names = [worker["name"] for worker in workers]
        answers = serve_until_each_works(cluster, names, seed=90)
        assert all(answer["usage"]["headstart"]["bytes_moved"] > 0 for answer in answers)
    finally:
        cluster.stop()


def test_two_prefill_and_two_decode_workers_share_the_work(pairs: Cluster) -> None:
    answers = serve_until_each_works(pairs, ["decode-0", "decode-1", "prefill-0", "prefill-1"], seed=50)
    assert all(answer["usage"]["headstart"]["bytes_moved"] > 0 for answer in answers)
    pairs.wait_until_free()


@pytest.mark.full
def test_sigterm_lets_a_running_stream_finish(pairs: Cluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(pairs.complete, prompt, 300) for prompt in prompts(2, 60, seed=70)]
        owner = until(
            lambda: [worker for worker in pairs.workers("decode") if worker["open_choices"]], "a request at its worker"
        )[0]["name"]
        os.kill(pairs.pid(owner), signal.SIGTERM)
        assert all(len(future.result(timeout=120)["choices"][0]["token_ids"]) == 300 for future in running)
