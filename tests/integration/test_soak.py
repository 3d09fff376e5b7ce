"""Ten minutes of everything at once over real processes: see benchmarks/soak.py for what is sent and what is judged."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SECONDS = 600


@pytest.mark.soak
@pytest.mark.behaviour("65")
def test_ten_minutes_of_mixed_load_leave_nothing_behind_and_nothing_grows(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", str(SECONDS), "--out", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 400)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "soak.png").exists()
