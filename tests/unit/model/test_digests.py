"""Remembering digests is optional: what is damaged is computed anew, what cannot be written is one warning."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headstart.model.digests import file_digest

CONTENT = b"weights" * 1000
RIGHT = hashlib.sha256(CONTENT).digest()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


def remembered(cache: Path) -> list[Path]:
    return sorted((cache / "digests").iterdir())


def test_a_digest_is_remembered_and_believed(weights: Path, tmp_path: Path) -> None:
    assert file_digest(weights, tmp_path / "cache") == RIGHT
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"W")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(weights, tmp_path / "cache") == RIGHT, "same size, time and inode: not read again"


@pytest.mark.parametrize(
    "damage", [b"", b"zz", RIGHT.hex().encode(), b"\xff\xfe", b"0" * 64 + b" " + b"0" * 16, b"00" * 40]
)
def test_a_damaged_digest_is_computed_anew(weights: Path, tmp_path: Path, damage: bytes) -> None:
    cache = tmp_path / "cache"
    file_digest(weights, cache)
    (path,) = remembered(cache)
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert file_digest(weights, cache) == RIGHT
    assert path.read_bytes() == whole


def test_a_digest_with_one_wrong_digit_is_computed_anew(weights: Path, tmp_path: Path) -> None:
    file_digest(weights, tmp_path / "cache")
    (path,) = remembered(tmp_path / "cache")
    text = path.read_text()
    path.write_text(("0" if text[0] != "0" else "1") + text[1:])
    assert file_digest(weights, tmp_path / "cache") == RIGHT


def test_a_cache_that_cannot_be_made_is_one_warning(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert file_digest(weights, tmp_path / "cache") == RIGHT
    assert len(caplog.records) == 1


def test_a_write_that_fails_leaves_no_staging_file(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file_digest(weights, tmp_path / "cache")
    (path,) = remembered(tmp_path / "cache")
    path.unlink()
    path.mkdir()  # the last step, the rename, now fails
    assert file_digest(weights, tmp_path / "cache") == RIGHT
    assert len(caplog.records) == 1
    assert remembered(tmp_path / "cache") == [path]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run as a user that has no home")
def test_a_user_without_a_home_has_a_cache_in_the_temporary_folder() -> None:
    program = "import os; from headstart.model.source import cache_dir; os.setuid(54321); print(cache_dir())"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).name == "headstart-54321"
