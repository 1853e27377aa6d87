"""What is wrong with NIXL on this machine is one line that says what to change, before anything starts."""

import contextlib
import importlib.util
import os
import re
import signal
import time
from pathlib import Path

import pytest

from shared_runtime.transport import nixl_process
from shared_runtime.transport.nixl_process import START_S, probe_nixl, two_ucx
from shared_schema.errors import DeployError
from tests.command import run_command
from tests.end_to_end.pair import nixl_over
from tests.shared_runtime.transport.over_nixl import receiving


def refusal() -> str:
    with pytest.raises(DeployError) as caught:
        probe_nixl()
    assert "\n" not in caught.value.message
    return caught.value.message


def children() -> str:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()


@pytest.mark.steady
def test_a_machine_with_nixl_passes_and_nothing_stays() -> None:
    before = children()
    probe_nixl()
    assert children() == before


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "NIXL_PLUGIN_DIR",
            "/nonexistent",
            "NIXL finds no plugins: point NIXL_PLUGIN_DIR at the folder with lib",
        ),
        ("UCX_TLS", "nosuch", r"check UCX_TLS, .* \[UCX: no usable transports/devices \(asked nosuch"),
        ("UCX_TLS", "posix,cma,self", "UCX_TLS, which must allow tcp or an RDMA transport"),
        ("UCX_NET_DEVICES", "nosuch0", "UCX_NET_DEVICES; or unset them"),
    ],
)
def test_each_wrong_setting_is_named(variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # case 52
    monkeypatch.setenv(variable, value)
    assert re.search(says, refusal())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # case 52
    (tmp_path / "nixl.py").write_text("raise ModuleNotFoundError(\"No module named 'nixl'\")\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert refusal() == (
        "NixlConnector needs NIXL, which cannot be imported (No module named 'nixl'): "
        "pip install nixl in this environment"
    )


def test_a_library_that_crashes_or_hangs_is_named_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # case 53
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "nixl.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert refusal().endswith(f"ended while it started (signal {signal.SIGSEGV.value})")
    (tmp_path / "nixl.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(nixl_process, "START_S", 2.0)
    begun = time.monotonic()
    assert refusal() == "NIXL did not start within 2 s"
    assert time.monotonic() - begun < START_S


def second_ucx(folder: Path) -> tuple[Path, Path]:
    """A libucs of another name, as another package would bring it, and the folder with what it needs."""
    package = Path(str(importlib.util.find_spec("nixl").origin)).parent.parent  # type: ignore[union-attr]
    original = next(package.glob("nixl_cu*.libs/libucs-*"))
    tag = original.name.split("-")[1][:8].encode()
    copied = folder / original.name.replace(tag.decode(), "0therone")
    copied.write_bytes(original.read_bytes().replace(b"libucs-" + tag, b"libucs-0therone"))
    return copied, original.parent


def test_a_second_ucx_works_or_is_named_within_the_limit(  # case 53
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, needs = second_ucx(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", str(copied))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(needs))
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            receiver, _ = stack.enter_context(receiving(folder, 4096))
            monkeypatch.undo()
            assert receiver.agent_pid is not None
            named = ", ".join(two_ucx(receiver.agent_pid))
        except DeployError as error:
            named = error.message
    assert str(copied) in named
    assert named.count("libucs-") == 2
    assert time.monotonic() - begun < START_S


@pytest.mark.parametrize("service", ["encoder_service", "diffusion_service"])
def test_a_service_that_cannot_use_nixl_says_so_in_one_line_and_exits_with_2(service: str, tmp_path: Path) -> None:
    file = tmp_path / nixl_over(tmp_path, "tiny")
    arguments = ("--model", "tiny", "--deploy-config", str(file), "--port", "0")
    done = run_command(service, *arguments, variables={"NIXL_PLUGIN_DIR": "/nonexistent"}, trace=False)
    assert (done.code, done.stdout, len(done.stderr)) == (2, "", 1), done.stderr
    assert ": NIXL finds no plugins: point NIXL_PLUGIN_DIR" in done.stderr[0]
