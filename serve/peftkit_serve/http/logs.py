"""Log lines for machines: one JSON object a record, and never a client's text.

The message of an unexpected exception may quote a prompt, so of an exception only type and place are written. What
is logged as a mapping (`logger.info({"request_id": …})`) becomes the object's own fields.
"""

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any


def fault(error: BaseException) -> dict[str, Any]:
    """An exception's type, and its frames as "file:line function"."""
    frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return {"exception": type(error).__name__, "traceback": frames}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        message: object = record.msg
        line.update(message if isinstance(message, Mapping) else {"message": record.getMessage()})
        if record.exc_info and record.exc_info[1] is not None:
            line.update(fault(record.exc_info[1]))
        return json.dumps(line, default=str)


def write_json_lines() -> None:
    """From now on all that the process logs goes to stderr as JSON; levels stay as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(handlers=[handler], force=True)
