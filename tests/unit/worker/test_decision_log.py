"""A dispatcher's decisions logged, decided again, and what is found if the log says something else."""

import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import msgpack, structs

from headstart.config.errors import ConfigError
from headstart.core.arrays import int32_array
from headstart.core.identity import PROTOCOL_VERSION, KVSpec
from headstart.core.kv_layout import KVLayout
from headstart.core.messages import (
    Accepted,
    Failed,
    Finished,
    Heartbeat,
    Join,
    Message,
    Submit,
    TokenDelta,
    Tokens,
    WorkerLoad,
    WorkerRef,
)
from headstart.core.request import ChoiceRef, FinishReason, Request, RequestStats, SamplingParams, StopCriteria
from headstart.gateway.dispatch import DispatcherApi
from headstart.gateway.limits import DispatchLimits
from headstart.sim.clock import VirtualClock
from headstart.sim.decision_report import replay_folder, report
from headstart.sim.replay import Verdict, replay
from headstart.worker.call_codec import codecs_of, encode
from headstart.worker.decision_log import DecisionLog, DecisionLogError, DispatcherSpec, RecordedCall, read_decision_log
from headstart.worker.recorder import CLOCK, record_dispatcher

SPEC = KVSpec(PROTOCOL_VERSION, "model", "none", KVLayout.full(16, 1, 1, 1, "float32"))
HEAD = DispatcherSpec(DispatchLimits(), "cache_aware", "model", "a seed")
WORKERS = (WorkerRef("decode-0", 1), WorkerRef("decode-1", 1))
Change = Callable[[RecordedCall], RecordedCall]


@dataclass
class Client:
    """Stops its choice from within the callback that brings the third token."""

    stop: Callable[[], None]
    tokens: list[int] = field(default_factory=list)
    ends: list[Message] = field(default_factory=list)

    def on_tokens(self, delta: TokenDelta) -> None:
        self.tokens += delta.token_ids
        if len(self.tokens) == 3:
            self.stop()

    def on_finished(self, finished: Finished) -> None:
        self.ends.append(finished)

    def on_failed(self, failed: Failed) -> None:
        self.ends.append(failed)


class Scene:
    """Two workers, and requests that one of them serves."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[str, Message]] = []
        self.log = DecisionLog.create(path.parent, path.stem, HEAD, max_bytes)
        self.gateway = record_dispatcher(HEAD, self.clock, self._send, self.log)[1]
        for worker in WORKERS:
            self.gateway.handle(str(worker), Join(worker, "decode", SPEC, "", 256))

    def _send(self, recipient: str, message: Message) -> None:
        self.sent.append((recipient, message))

    def serve(self, name: str, num_tokens: int) -> Client:
        client = Client(lambda: self.gateway.stop(name, 0))
        request = Request(
            ChoiceRef(name), int32_array(range(20)), SamplingParams(), StopCriteria(num_tokens), b"", remaining_s=60.0
        )
        self.gateway.submit(request, client)
        worker, submit = next((to, message) for to, message in reversed(self.sent) if isinstance(message, Submit))
        ref = submit.request.ref
        self.gateway.handle(worker, Accepted(ref))
        for index in range(min(num_tokens, 3)):
            self.pass_time(0.1)
            self.gateway.handle(worker, Tokens((TokenDelta(ref, index, (index,)),)))
        self.gateway.handle(worker, Finished(ref, FinishReason.LENGTH, num_tokens, RequestStats()))
        return client

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)
        for worker in WORKERS:
            self.gateway.handle(f"hb:{worker}", Heartbeat(worker, 0.0, WorkerLoad()))
        self.gateway.advance()

    def play(self) -> None:
        for number, num_tokens in enumerate((2, 5, 1, 3, 8)):
            client = self.serve(f"request-{number}", num_tokens)
            assert len(client.ends) == 1
        self.gateway.flush(lambda ok, num_pages: None)
        self.pass_time(5.0)
        self.log.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "logs" / "gateway.decisions"
    Scene(path).play()
    return path


def verdict(path: Path, change: Change = lambda call: call) -> Verdict:
    head, calls = read_decision_log(path)
    return replay(head, map(change, calls))


def test_the_same_is_decided_again_with_calls_from_within_callbacks(log: Path) -> None:
    found = verdict(log)
    assert found.difference is None
    assert any(inner.calls for call in read_decision_log(log)[1] for inner in call.calls)
    assert replay_folder(log.parent) == 0


def test_only_the_owner_can_read_a_log(log: Path) -> None:
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


HANDLE = codecs_of(DispatcherApi)["handle"].arguments


def with_another_token(call: RecordedCall) -> RecordedCall:
    if call.method != "handle":
        return call
    sender, message = HANDLE.decode(call.arguments)
    if not isinstance(message, Tokens) or message.deltas[0].index != 1:
        return call
    other = Tokens((structs.replace(message.deltas[0], token_ids=(77,)),))
    return structs.replace(call, arguments=encode((sender, other)))


def with_another_time(call: RecordedCall) -> RecordedCall:
    def later(inner: RecordedCall) -> RecordedCall:
        if inner.target != CLOCK or (time := msgpack.decode(inner.result)) <= 1.0:
            return inner
        return structs.replace(inner, result=encode(time + 4.0))

    return structs.replace(call, calls=tuple(map(later, call.calls)))


def with_one_reading_less(call: RecordedCall) -> RecordedCall:
    readings = [inner for inner in call.calls if inner.target == CLOCK]
    if len(readings) != 1:
        return call
    return structs.replace(call, calls=tuple(inner for inner in call.calls if inner.target != CLOCK))


@pytest.mark.parametrize("change", [with_another_token, with_another_time, with_one_reading_less])
def test_another_input_is_found_where_it_first_matters(log: Path, change: Change) -> None:
    found = verdict(log, change).difference
    assert found is not None
    assert found.logged != found.done


def test_the_report_names_the_call_and_both_outcomes(log: Path) -> None:
    text = "\n".join(report(verdict(log, with_another_token)))
    assert "handle decode-" in text
    assert "token_ids=(1,)" in text.split("logged:")[1]
    assert "token_ids=(77,)" in text.split("now:")[1]


def test_a_missing_decision_is_found(log: Path) -> None:
    silenced = verdict(log, lambda call: structs.replace(call, calls=call.calls[:-1]))
    assert silenced.difference is not None
    assert silenced.difference.logged == "nothing more"


def test_a_full_log_ends_and_what_it_holds_is_replayed(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "short.decisions", max_bytes=4000)
    scene.play()
    assert (tmp_path / "short.decisions").stat().st_size <= 4000
    found = verdict(tmp_path / "short.decisions")
    assert found.difference is None
    assert 5 < found.num_calls < 60


def test_the_log_of_a_killed_process_is_replayed_as_far_as_it_goes(log: Path) -> None:
    whole = verdict(log).num_calls
    log.write_bytes(log.read_bytes()[:-3])
    assert verdict(log).num_calls == whole - 1
    assert verdict(log).difference is None


def test_an_existing_log_is_never_written_over(log: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        DecisionLog.create(log.parent, log.stem, HEAD, 1000)


def test_another_file_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.decisions"
    path.write_bytes(b"\x05\x00\x00\x00hello and more")
    with pytest.raises(DecisionLogError):
        read_decision_log(path)
    assert replay_folder(tmp_path) == 1
    assert "no decision log" in capsys.readouterr().err
    assert replay_folder(tmp_path / "empty") == 1
