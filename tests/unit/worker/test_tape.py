"""A dispatcher on tape, decided again, and what is found where the tape says something else."""

import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

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
from headstart.gateway.limits import DispatchLimits
from headstart.sim.clock import VirtualClock
from headstart.sim.replay import Verdict, replay
from headstart.sim.replay_report import replay_folder, report
from headstart.worker.recording import RecordedDispatcher, record_dispatcher
from headstart.worker.tape import Call, DispatcherSpec, Received, TapeError, TapeWriter, frame_of, message_in, read_tape

SPEC = KVSpec(PROTOCOL_VERSION, "model", "none", KVLayout.full(16, 1, 1, 1, "float32"))
HEAD = DispatcherSpec(DispatchLimits(), "cache_aware", "model", "a seed")
WORKERS = (WorkerRef("decode-0", 1), WorkerRef("decode-1", 1))
Change = Callable[[Call], Call]


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
        self.tape = TapeWriter.create(path.parent, path.stem, HEAD, max_bytes)
        self.gateway: RecordedDispatcher = record_dispatcher(HEAD, self.clock, self._send, self.tape)
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
        self.tape.close()


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    path = tmp_path / "tapes" / "gateway.tape"
    Scene(path).play()
    return path


def verdict(path: Path, change: Change = lambda call: call) -> Verdict:
    head, calls = read_tape(path)
    return replay(head, map(change, calls))


def test_the_same_is_decided_again_with_calls_from_within_callbacks(tape: Path) -> None:
    found = verdict(tape)
    assert found.difference is None
    assert any(isinstance(effect, Call) for call in read_tape(tape)[1] for effect in call.effects)
    assert replay_folder(tape.parent) == 0


def test_only_the_owner_can_read_a_tape(tape: Path) -> None:
    assert stat.S_IMODE(tape.stat().st_mode) == 0o600
    assert stat.S_IMODE(tape.parent.stat().st_mode) == 0o700


def with_another_token(call: Call) -> Call:
    message = message_in(call.input.frame) if isinstance(call.input, Received) else None
    if not isinstance(message, Tokens) or message.deltas[0].index != 1:
        return call
    other = Tokens((structs.replace(message.deltas[0], token_ids=(77,)),))
    return structs.replace(call, input=Received(call.input.sender, frame_of(other)))


def with_another_time(call: Call) -> Call:
    return structs.replace(call, times=tuple(time + 4.0 if time > 1.0 else time for time in call.times))


def with_one_reading_less(call: Call) -> Call:
    return structs.replace(call, times=call.times[:-1]) if len(call.times) == 1 else call


@pytest.mark.parametrize("change", [with_another_token, with_another_time, with_one_reading_less])
def test_another_input_is_found_where_it_first_matters(tape: Path, change: Change) -> None:
    found = verdict(tape, change).difference
    assert found is not None
    assert found.noted != found.done


def test_the_report_names_the_call_and_both_outcomes(tape: Path) -> None:
    text = "\n".join(report(verdict(tape, with_another_token)))
    assert "from decode-" in text
    assert "token_ids=(1,)" in text.split("noted:")[1]
    assert "token_ids=(77,)" in text.split("now:")[1]


def test_a_missing_decision_is_found(tape: Path) -> None:
    silenced = verdict(tape, lambda call: structs.replace(call, effects=call.effects[:-1]))
    assert silenced.difference is not None
    assert silenced.difference.noted == "nothing more"


def test_a_full_tape_ends_and_what_it_holds_is_replayed(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "short.tape", max_bytes=4000)
    scene.play()
    assert (tmp_path / "short.tape").stat().st_size <= 4000
    found = verdict(tmp_path / "short.tape")
    assert found.difference is None
    assert 5 < found.num_calls < 60


def test_the_tape_of_a_killed_process_is_replayed_as_far_as_it_goes(tape: Path) -> None:
    whole = verdict(tape).num_calls
    tape.write_bytes(tape.read_bytes()[:-3])
    assert verdict(tape).num_calls == whole - 1
    assert verdict(tape).difference is None


def test_an_existing_tape_is_never_written_over(tape: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        TapeWriter.create(tape.parent, tape.stem, HEAD, 1000)


def test_another_file_is_no_tape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.tape"
    path.write_bytes(b"\x05\x00\x00\x00hello and more")
    with pytest.raises(TapeError):
        read_tape(path)
    assert replay_folder(tmp_path) == 1
    assert "no tape" in capsys.readouterr().err
    assert replay_folder(tmp_path / "empty") == 1
