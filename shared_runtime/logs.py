"""Logging of API processes and ranks: one line a record, with time, level and process name. No library noise."""

import logging
import sys
import time
from typing import Literal, TextIO

OWN = ("shared_schema", "shared_runtime", "encoder_service", "diffusion_service")
"""Packages that log at the level asked for; everyone else at `warning`."""
SILENT = ("uvicorn.access",)
"""Every request is a job or a probe, and those have lines of their own."""


class OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO encoder-tp0 encoder_service.worker: message`, line breaks written as `\\n`."""

    converter = staticmethod(time.gmtime)

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)s {process} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        """The record with its traceback, as one line."""
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def set_up_logging(
    level: Literal["debug", "info", "warning", "error"], process: str, stream: TextIO | None = None
) -> None:
    """Send every record of this process to `stream` (stderr when None), once; a second call replaces the first.

    Args:
        level: of our own packages.
        process: the name that `ps` shows: `encoder-api`, `diffusion-u3`.
        stream: where lines go.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(OneLine(process))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for package in OWN:
        logging.getLogger(package).setLevel(level.upper())
    for package in SILENT:
        logging.getLogger(package).setLevel(logging.ERROR)
