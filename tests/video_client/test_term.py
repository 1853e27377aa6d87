"""TERM to what starts pairs of its own: the services end with it, and nothing is left of them."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shared_runtime.tiny import tiny_checkpoint
from tests.command import ROOT
from tests.end_to_end.processes import wait_until

FORKERS = 5
"""Processes: the command, both services, and what will make the ranks of each."""
RANKS = 7


def demo(folder: Path) -> list[str]:
    return ["video_client.demo", "--folder", str(folder)]


def meaning(folder: Path) -> list[str]:
    return ["tests.meaning.run", "--model", str(tiny_checkpoint()), "--out", str(folder)]


@pytest.mark.parametrize(
    ("command", "processes"), [(demo, FORKERS), (meaning, FORKERS), pytest.param(demo, RANKS, marks=pytest.mark.slow)]
)
def test_term_ends_the_services_too(command: Callable[[Path], list[str]], processes: int, tmp_path: Path) -> None:
    mark = str(uuid.uuid4())
    run = subprocess.Popen(
        [sys.executable, "-m", *command(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "STARTED_BY": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(marked(mark)) >= processes, 60, "the services to start")
        run.terminate()
        assert run.wait(60) in (130, -signal.SIGINT)
        wait_until(lambda: not marked(mark), 5, "every process to end")
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
        run.wait()


def marked(mark: str) -> list[int]:
    """Processes that were started with the mark in their environment, whoever their parent is by now."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            environment = (each / "environ").read_bytes()
        except OSError:
            continue
        if f"STARTED_BY={mark}".encode() in environment.split(b"\0"):
            found.append(int(each.name))
    return found
