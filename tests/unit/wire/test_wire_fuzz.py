"""The wire's decoders under inputs that coverage chooses. The longer the better: `make fuzz`."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TARGET = Path(__file__).with_name("fuzz_target.py")
needs_atheris = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this platform")


def fuzz(num_runs: int, folder: Path) -> subprocess.CompletedProcess[str]:
    # Resident memory is counted from the peak of whoever forked: a worker that had a model loaded. One allocation is bounded.
    memory = ["-rss_limit_mb=0", "-malloc_limit_mb=256"]
    argv = [sys.executable, str(TARGET), f"-runs={num_runs}", "-seed=7", f"-artifact_prefix={folder}/", *memory]
    return subprocess.run(argv, capture_output=True, text=True, timeout=600)


@needs_atheris
@pytest.mark.parametrize("num_runs", [20_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_whatever_the_bytes_a_decoder_gives_a_message_or_a_wire_error(num_runs: int, tmp_path: Path) -> None:
    done = fuzz(num_runs, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"Done {num_runs} runs" in done.stderr


@needs_atheris
def test_a_decoder_that_raises_anything_else_would_be_found() -> None:
    from fuzz_target import CODECS, one_input, seeds

    def careless(frame: bytes) -> None:
        raise KeyError(frame)

    for seed in seeds():
        one_input(seed)
        with pytest.raises(KeyError):
            one_input(seed, [careless] * len(CODECS))
        with pytest.raises(AssertionError, match="is no message of"):
            one_input(seed, [lambda frame: frame] * len(CODECS))


@needs_atheris
def test_every_seed_is_a_message() -> None:
    from fuzz_target import CODECS, seeds

    messages = [CODECS[seed[0]].decode(seed[1:]) for seed in seeds()]
    assert len({type(message) for message in messages}) > 20
