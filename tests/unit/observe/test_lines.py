"""Log lines say what happened, once, and nothing while nothing happens."""

import json
import logging

import pytest

from headstart.core.messages import WorkerLoad
from headstart.observe.decode_line import INTERVAL_S, LoadLine
from headstart.observe.logs import JsonFormatter, KeyValueFormatter
from headstart.observe.mismatch_log import MismatchLog


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "created": 0.0})
    vars(made).update(extra)
    return made


def test_a_line_names_its_process_and_quotes_what_has_spaces() -> None:
    line = KeyValueFormatter("decode-0").format(record("ready", pages=3, reason="two words"))
    assert line.endswith('INFO    decode-0 ready pages=3 reason="two words"')


def test_a_json_line_carries_the_same_fields() -> None:
    fields = json.loads(JsonFormatter("decode-0").format(record("ready", pages=3)))
    assert (fields["process"], fields["event"], fields["pages"]) == ("decode-0", "ready", 3)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [line for line in caplog.records if line.name == "headstart.worker"]


def test_the_load_line_reports_rates_bytes_moved_and_bytes_saved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = LoadLine("decode", page_size=16, page_bytes=1_000_000)
    line.observe(0.0, WorkerLoad())
    counters = {"prompt_tokens": 100.0, "hit_tokens": 80.0, "output_tokens": 50.0, "pages_moved": 2.0}
    line.observe(INTERVAL_S, WorkerLoad(num_running=1, free_pages=9, counters=counters))
    (said,) = lines(caplog)
    fields = vars(said)
    assert (fields["running"], fields["hit_rate"], fields["tokens_per_s"]) == (1, 0.8, 50.0 / INTERVAL_S)
    assert (fields["mb_moved"], fields["mb_saved"]) == (2.0, 5.0)


def test_an_idle_worker_says_nothing_after_its_last_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = LoadLine("decode", page_size=16, page_bytes=1000)
    for beat, load in enumerate((WorkerLoad(), WorkerLoad(num_running=1), WorkerLoad(), WorkerLoad(), WorkerLoad())):
        line.observe(beat * INTERVAL_S, load)
    assert len(lines(caplog)) == 2


def test_a_long_line_is_its_event_and_one_fact_a_line() -> None:
    facts = {f"fact_{number}": "x" * 20 for number in range(6)}
    first, *rest = KeyValueFormatter("decode-0").format(record("loaded", **facts)).splitlines()
    assert first.endswith("decode-0 loaded")
    assert rest == [f"    fact_{number}={'x' * 20}" for number in range(6)]


def test_incarnations_are_short_for_people_and_whole_in_json() -> None:
    event = record("worker joined", worker="decode-0#1764385176123456789", replaces="decode-0#2")
    assert KeyValueFormatter("gateway").format(event).endswith("worker=decode-0#456789 replaces=decode-0#2")
    assert json.loads(JsonFormatter("gateway").format(event))["worker"] == "decode-0#1764385176123456789"


def test_a_mismatch_is_logged_once_and_again_if_it_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    log = MismatchLog()
    text = "prefill-0 (here) and decode-0 (there) exchange no KV: page_size differs: 16 here, 32 there"
    for mismatches in ((), (text,), (text,), (), (text,)):
        log.observe(WorkerLoad(mismatches=mismatches))
    assert [line.getMessage() for line in lines(caplog)] == [text, text]
