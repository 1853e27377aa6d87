"""Every command of README and `docs/` is run as it stands there, from top to bottom, against a live pair.

What stands there as `.venv/bin/...` and port 8000 is this environment and the pair of the tests.
"""

import contextlib
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.documents import PAGES, ROOT, Block, blocks
from tests.end_to_end import processes
from tests.end_to_end.pair import START_S, STOP_S, Pair, free_port
from tests.end_to_end.plain_media import read_clip
from video_client.samples import make_samples
from video_client.scenes import world_requests

pytestmark = pytest.mark.slow

BLOCK_S = 300.0
"""For all commands of one page."""
PROGRAMS = {
    "python": "",
    "h3-encoder": "-m encoder_service",
    "h3-diffusion": "-m diffusion_service",
    "h3-video": "-m video_client.make",
}
CLIENTS = {
    "python": '[ "$1 $2" = "-m video_client" ] && set -- -m video_client --url "$PAIR_URL" "${@:3}"\n',
    "h3-video": 'set -- --url "$PAIR_URL" "$@"\n',
}
"""Clients are told where the pair is. The documents leave that out, since they take port 8000 by themselves."""
COMMANDS = [page for page in PAGES if any(block.language == "sh" and block.mark is None for block in blocks(page))]
STANDING = [block for page in PAGES for block in blocks(page) if block.foreground]
CLIPS = ("clip.mp4", "frames.mp4", "references.mp4")


def run_here(block: Block) -> bool:
    return block.language == "sh" and block.mark is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a clone looks like after `make setup` and `make demo`, as far as the documents name it."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in PROGRAMS.items():
        program = programs / name
        run = f"exec {shlex.quote(sys.executable)}"
        program.write_text(f'#!/usr/bin/env bash\n{CLIENTS.get(name, "")}{run} {module} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for name in ("Makefile", "docs", "docker"):
        (tmp_path / name).symlink_to(ROOT / name)
    make_samples(tmp_path / "demo" / "inputs")
    world_requests(tmp_path / "demo" / "inputs")
    # Answers of 400 and more end a command, as a reader would see that they are no clip.
    (tmp_path / ".curlrc").write_text("fail-with-body\nshow-error\n")
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("H3_")}
    return {**plain, "PYTHONPATH": str(ROOT), "CURL_HOME": str(folder), "HF_HUB_OFFLINE": "1", **more}


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_every_command_does_what_it_says(pair: Pair, folder: Path, page: Path) -> None:
    (folder / "state").symlink_to(pair.state)
    pair.completed(pair.submit({"prompt": "one that is there already", "num_frames": "107"}))
    parts = [f": === line {block.line}\n{block.body}" for block in blocks(page) if run_here(block)]
    script = "\n".join(parts).replace("http://127.0.0.1:8000", pair.diffusion.url)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(folder, PAIR_URL=pair.diffusion.url),
        capture_output=True,
        text=True,
        timeout=BLOCK_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    for name in CLIPS:
        if f"-o {name}" in script:
            assert read_clip((folder / name).read_bytes()).frames.shape[0] >= 107, name


@contextlib.contextmanager
def standing(block: Block, folder: Path, ports: dict[str, int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Every line of the block as a process, as in terminals of their own; afterwards Ctrl-C in each, last one first."""
    body = block.body
    for written, port in ports.items():
        body = body.replace(f"--port {written}", f"--port {port}").replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
    variables = environment(folder, PORT=str(ports["8000"]), ENCODER_PORT=str(ports["8001"]))
    with (folder / "out").open("ab") as out:
        running: list[subprocess.Popen[bytes]] = []
        try:
            for line in body.splitlines():
                command = shlex.split(line)
                running.append(
                    subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out, process_group=0)
                )
            yield running
            for process in reversed(running):
                os.killpg(process.pid, signal.SIGINT)
                process.wait(STOP_S)
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("block", STANDING, ids=lambda block: f"{block.page.name}:{block.line}")
def test_what_stays_until_ctrl_c_serves_until_then(folder: Path, block: Block) -> None:
    ports = {"8000": free_port(), "8001": free_port()}
    url = f"http://127.0.0.1:{ports['8000']}"
    with standing(block, folder, ports) as running:
        deadline = time.monotonic() + START_S
        while not answers(url):
            assert all(process.poll() is None for process in running), (folder / "out").read_text()
            assert time.monotonic() < deadline, (folder / "out").read_text()
            time.sleep(0.2)
        assert "<title>" in httpx.get(f"{url}/", timeout=10).text
    said = (folder / "out").read_text()
    assert said.count(" ready at http") >= 2, said
    assert "Traceback" not in said, said
    for port in ports.values():
        processes.wait_until(lambda port=port: not listening(port), 10, "the ports are free")  # type: ignore[misc]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def listening(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/livez", timeout=5)
    except httpx.TransportError:
        return False
    return True
