"""One line an event, `time level process event key=value ...`, on standard error. Values are quoted where needed."""

import json
import logging
import sys
import time

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
        extra = " ".join(f"{key}={_plain(value)}" for key, value in vars(record).items() if key not in RESERVED)
        line = f"{head} {extra}" if extra else head
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
