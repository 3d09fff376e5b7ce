"""What a real cluster decided under load, decided again from its logs."""

import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from cluster import DEMO, TINY_FLAGS, Cluster, until

from headstart.core.messages import Message
from headstart.scheduler.protocol import Scheduler
from headstart.sim.replay import Verdict, replay
from headstart.worker.call_codec import codecs_of
from headstart.worker.decision_log import read_decision_log


def converse(cluster: Cluster, seed: int) -> None:
    rng = Random(seed)
    prompt = [rng.randrange(100, 40_000) for _ in range(70)]
    for _ in range(3):
        answer = cluster.complete(prompt, 20)
        prompt = prompt + answer["choices"][0]["token_ids"] + [rng.randrange(100, 40_000) for _ in range(25)]


def leave_early(cluster: Cluster) -> None:
    body = {"model": DEMO, "prompt": list(range(500, 540)), "max_tokens": 7000, "stream": True, "ignore_eos": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())


def stop_at_text(cluster: Cluster) -> None:
    """The client's stream ends its choice from within the gateway's callback."""
    text = cluster.complete(list(range(700, 760)), 12)["choices"][0]["text"]
    stopped = cluster.complete(list(range(700, 760)), 12, stop=[text[len(text) // 2 :][:3]])
    assert stopped["choices"][0]["finish_reason"] == "stop"


def recorded(folder: Path, load: Callable[[Cluster], None]) -> dict[str, Path]:
    """Run a cluster under `load`; its logs by the first part of their names."""
    folder.mkdir()
    logs = folder / "logs"
    cluster = Cluster(folder, *TINY_FLAGS, "--local-prefill-tokens", "16", "--record", str(logs))
    try:
        cluster.wait_until_ready()
        load(cluster)
        cluster.wait_until_free()
    finally:
        cluster.stop()
    return {path.name.split(".")[0]: path for path in logs.iterdir()}


def verdict(path: Path) -> Verdict:
    return replay(*read_decision_log(path))


def test_a_recorded_run_decides_the_same_again(tmp_path: Path) -> None:
    def load(cluster: Cluster) -> None:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(converse, cluster, seed) for seed in range(3)]:
                done.result()
        leave_early(cluster)
        stop_at_text(cluster)
        until(lambda: not cluster.state()["unfinished"], "the end of what the client left")

    logs = recorded(tmp_path / "run", load)
    assert logs.keys() == {"gateway", "decode-0", "prefill-0"}
    for path in logs.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        found = verdict(path)
        assert found.difference is None
        assert found.num_decisions > 100
    kinds = {type(message).__name__ for message in received(logs["decode-0"])}
    assert {"Submit", "Cancel", "Welcome", "PrefillDone"} <= kinds


def received(path: Path) -> list[Message]:
    arguments = codecs_of(Scheduler)["handle"].arguments
    return [arguments.decode(call.arguments)[1] for call in read_decision_log(path)[1] if call.method == "handle"]
