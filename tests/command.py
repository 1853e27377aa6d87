"""Runs the real command of a service in its own process, the way a shell does."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRACE = "import time:"


@dataclass(frozen=True)
class Outcome:
    """What a finished command left behind."""

    code: int
    stdout: str
    stderr: list[str]
    """Lines, without the import trace."""
    imported: frozenset[str]
    """Every module that was loaded."""
    seconds: float
    """Of CPU: a busy machine does not change it much."""


def run_command(
    service: str, *arguments: str, variables: Mapping[str, str] | None = None, trace: bool = True
) -> Outcome:
    """`python -m SERVICE ARGUMENTS` with no `H3_` variable but `variables`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("H3_")}
    options = ["-X", "importtime"] if trace else []
    begin = _seconds_of_children()
    done = subprocess.run(
        [sys.executable, *options, "-m", service, *arguments],
        cwd=ROOT,
        env={**environment, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    seconds = _seconds_of_children() - begin
    lines = done.stderr.splitlines()
    return Outcome(
        code=done.returncode,
        stdout=done.stdout,
        stderr=[line for line in lines if not line.startswith(TRACE)],
        imported=frozenset(line.rpartition("|")[2].strip() for line in lines if line.startswith(TRACE)),
        seconds=seconds,
    )


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
