"""Logging of API processes and ranks: one line a record, as text for people or JSON for machines. No library noise."""

import json
import logging
import sys
import time
from typing import TextIO

from shared_runtime.tracing import request_id
from shared_schema.deploy.settings import LogFormat, LogLevel

OWN = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service")
"""Packages that log at the level asked for; everyone else at `warning`."""
SILENT = ("uvicorn.access",)
"""Every request is a job or a probe, and those have lines of their own."""


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO encoder-tp0 encoder_service.worker: message`, line breaks written as `\\n`.

    A line that is about a request has `[its id]` before the message.
    """

    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(request)s%(message)s",
            datefmt="%Y-%m-%dT%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        """The record with its traceback, as one line."""
        request = request_id()
        record.request = "" if request is None else f"[{request}] "
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonLine(logging.Formatter):
    """`{"time","level","process","logger","request_id","message","error"}`: one object a line, the last if raised."""

    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record with its traceback, as one line of JSON."""
        shown: dict[str, object] = {
            "time": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "request_id": request_id(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["error"] = self.formatException(record.exc_info)
        return json.dumps(shown)


def set_up_logging(level: LogLevel, process: str, form: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Send every record of this process to `stream` (stderr when None), once; a second call replaces the first.

    Args:
        level: of our own packages.
        process: the name that `ps` shows: `encoder-api`, `diffusion-u3`.
        form: of the lines.
        stream: where lines go.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(OneLine(process) if form == "text" else JsonLine(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for package in OWN:
        logging.getLogger(package).setLevel(level.upper())
    for package in SILENT:
        logging.getLogger(package).setLevel(logging.ERROR)
