"""Sends both services what schemathesis draws from their `/openapi.json`: no answer may be our fault, none may hang.

    python -m tests.fuzz.run --seconds 60 [--seed N] [--only encoder|diffusion]

A live pair on the tiny checkpoint, with a short queue and a short sync limit, so that both are met. Every answer has to
be one that the document describes. Afterwards the pair must still make the clip that it made before.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared_runtime.tiny import tiny_checkpoint
from tests.end_to_end.clips import TEXT
from tests.end_to_end.pair import Pair, Service, make_pair

SETTINGS = {"queue_limit": 8, "sync_timeout_s": 3, "drain_s": 3, "encode_timeout_s": 60}
ROOT = Path(__file__).parents[2]
CONFIG = Path(__file__).with_name("schemathesis.toml")
GRACE_S = 120
"""schemathesis finishes the case that it is at, and shrinks nothing."""
WRONG_IN_LOG = ("Traceback", " ERROR ", " CRITICAL ")


def fuzz(service: Service, seconds: int, seed: int) -> list[str]:
    """What was wrong with the answers of one service."""
    command = ["schemathesis", "--config-file", str(CONFIG), "run", f"{service.url}/openapi.json"]
    command += ["--max-time", str(seconds), "--seed", str(seed), "--no-shrink", "--phases", "coverage,fuzzing,stateful"]
    print(f"\n=== {service.package}: {' '.join(command)}", flush=True)
    program = [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="h3-fuzz-") as folder:
        try:
            done = subprocess.run(program, cwd=folder, env=environment, timeout=seconds + GRACE_S, check=False)
        except subprocess.TimeoutExpired:
            return [f"{service.package}: schemathesis did not end: does an answer hang?"]
    return [] if done.returncode == 0 else [f"{service.package}: schemathesis ended with {done.returncode}"]


def emptied(pair: Pair) -> None:
    """No job is left."""
    while jobs := pair.client.get("/v1/videos", params={"limit": 100}).raise_for_status().json()["data"]:
        for job in jobs:
            pair.client.delete(f"/v1/videos/{job['id']}").raise_for_status()


def wrong_lines(service: Service) -> list[str]:
    """Ends of the log's lines that tell of a fault of ours, each kind once."""
    lines = service.log.read_text(errors="replace").splitlines()
    ends = dict.fromkeys(line[-1000:] for line in lines if any(mark in line for mark in WRONG_IN_LOG))
    return [f"{service.package}: {end}" for end in ends]


def run(root: Path, seconds: int, seed: int, only: str | None) -> list[str]:
    """Start a pair, fuzz it, stop it; what was wrong."""
    pair = make_pair(root, str(tiny_checkpoint()), SETTINGS)
    wrong: list[str] = []
    try:
        pair.start()
        digest = pair.completed(pair.submit(TEXT.fields()))["frames_sha256"]
        for service in (pair.encoder, pair.diffusion):
            if only is None or service.package.startswith(only):
                wrong += fuzz(service, seconds, seed)
        emptied(pair)
        if pair.completed(pair.submit(TEXT.fields()))["frames_sha256"] != digest:
            wrong.append("the same request gives another clip afterwards")
        for service in (pair.encoder, pair.diffusion):
            wrong += wrong_lines(service)
    finally:
        wrong += pair.close()
        shutil.rmtree(pair.slabs)
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.run", description="Fuzz both services.")
    parser.add_argument("--seconds", type=int, default=60, help="for each service")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=["encoder", "diffusion"])
    options = parser.parse_args(arguments)
    seed = random.randrange(2**31) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="h3-fuzzed-") as folder:
        wrong = run(Path(folder), options.seconds, seed, options.only)
    print("\n".join([f"seed {seed}: {len(wrong)} things wrong", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
