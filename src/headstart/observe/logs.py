"""One line an event, `time level process event key=value ...`, on standard error. Values are quoted where needed.

For people, a line that would not fit is followed by its facts, one a line, and of a long number of an incarnation only the
last digits are shown. JSON lines carry everything in full.
"""

import json
import logging
import re
import sys
import time

MOST_COLUMNS = 120
INCARNATION = re.compile(r"#\d{4,}(?=\d{6})")
"""The leading digits of an incarnation: a time in nanoseconds, whose last six digits tell two apart."""

RESERVED = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
"""Attributes every record has; whatever else a record carries came in as `extra` and is printed."""


class KeyValueFormatter(logging.Formatter):
    """`extra={"pages": 3}` becomes `pages=3` behind the message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._process} {record.getMessage()}"
        facts = [f"{key}={_plain(value)}" for key, value in vars(record).items() if key not in RESERVED]
        line = INCARNATION.sub("#", " ".join([head, *facts]))
        if len(line) > MOST_COLUMNS and len(facts) > 1:
            line = INCARNATION.sub("#", "\n    ".join([head, *facts]))
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """The same record as one JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "process": self._process,
            "event": record.getMessage(),
        }
        fields |= {key: value for key, value in vars(record).items() if key not in RESERVED}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logging(process: str, level: str = "INFO", as_json: bool = False) -> None:
    """Send every logger of this process to standard error. Called once, by the process's main."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else KeyValueFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return json.dumps(text) if not text or any(c.isspace() or c in '"=' for c in text) else text
