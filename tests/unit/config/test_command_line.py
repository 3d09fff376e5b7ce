"""What the command says about itself and about command lines that cannot work."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.cli import COMMANDS, parse, usage
from headstart.config.errors import ConfigError
from headstart.config.other_names import OURS

HEADSTART = [sys.executable, "-m", "headstart"]


def ran(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'exec "$@" {shell}', "bash", *HEADSTART, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse(["serve", *arguments])
    return str(error.value)


def test_the_module_runs_and_says_its_version() -> None:
    done = ran("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("headstart ")


def test_the_usage_names_every_command_within_80_columns() -> None:
    lines = usage().splitlines()
    assert [name for name in COMMANDS if not any(line.startswith(f"  {name} ") for line in lines)] == []
    assert max(map(len, lines)) <= 80 + len("headstart COMMAND")


def test_values_out_of_range_are_told_all_at_once() -> None:
    found = refused("--port", "0", "--page-size", "0", "--decode", "0", "--prefill", "-1", "--log-level", "LOUD")
    assert len(found.splitlines()) == 1 + 5
    for flag, value in (("--port", 0), ("--page-size", 0), ("--decode", 0), ("--prefill", -1), ("--log-level", "LOUD")):
        assert any(flag in line and str(value) in line for line in found.splitlines())


def test_one_is_told_alone_and_names_its_own_role() -> None:
    assert refused("--decode", "-1") == "--decode must be auto or at least 1, got -1"
    assert refused("--prefill", "-1") == "--prefill must be auto or at least 0, got -1"


@pytest.mark.parametrize("name", OURS)
def test_names_of_other_servers_are_answered_with_ours(name: str) -> None:
    message = refused(name, "1")
    assert message.startswith(f"{name}: ")
    assert OURS[name] in message


def test_several_names_of_other_servers_with_equal_signs_and_underscores_are_answered_together() -> None:
    message = refused("--max_model_len=4096", "--gpu-memory-utilization=0.9")
    assert "--max-model-len: here it is --context-length" in message
    assert "--gpu-memory-utilization: here it is --mem-fraction-static" in message


def test_a_command_whose_own_flag_it_is_takes_it() -> None:
    parse(["bench", "--model", "m", "--base-url", "http://127.0.0.1:1"])


def test_an_unknown_flag_points_to_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--no-such-flag"])
    assert "headstart serve --help" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no command 'server'; there is serve, gateway"):
        parse(["server"])


def test_a_pool_of_less_than_two_pages_is_refused_before_anything_loads() -> None:
    done = ran("serve", "no-such-model", "--max-total-tokens", "10")
    assert done.returncode == 2
    assert "--max-total-tokens 10 with --page-size auto: fewer than two pages of 16 tokens." in done.stderr


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_do_not_matter(closed: str) -> None:
    done = ran("key", shell=closed)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 2


def test_output_that_cannot_be_written_is_a_failure_of_at_most_one_line() -> None:
    done = ran("key", shell=">/dev/full")
    assert done.returncode == 1
    assert done.stderr in ("", "headstart: output cannot be written: No space left on device\n")


def test_a_log_that_cannot_be_written_leaves_the_exit_status_as_it_is() -> None:
    assert ran("serve", "--port", "0", shell="2>/dev/full").returncode == 2


def test_an_interrupted_measurement_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        bench = subprocess.Popen([*HEADSTART, "bench", "--base-url", url], stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()  # it waits for an answer now
        with connection:
            bench.send_signal(signal.SIGINT)
            _, said = bench.communicate(timeout=60)
    assert (bench.returncode, said) == (128 + signal.SIGINT, "headstart: interrupted\n")


@pytest.mark.parametrize("command", [("serve",), ("gateway",), ("decode", "--join", "127.0.0.1:9")])
def test_a_model_that_cannot_be_served_is_one_line_and_status_2(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    name, *flags = command
    done = ran(name, str(tmp_path), *flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "model type 't5' is an encoder-decoder model" in line


@pytest.mark.parametrize("command", [("serve", "--control-host", "::1"), ("decode", "--join", "[::1]:9")])
def test_a_control_address_of_ipv6_is_refused_by_name(command: tuple[str, ...]) -> None:
    done = ran(*command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "IPv4 only" in line
