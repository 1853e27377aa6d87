"""One NIXL agent over UCX: registers memory, knows its peers, writes, notifies. The only user of `nixl`; no torch.

Runs in the encoder's leader (which sends) and in the small child of the diffusion service's API process (which
receives). NIXL is an extra, so it is imported when the first agent is made; what is missing is said in one line.
"""

import base64
import binascii
import importlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np

from shared_schema.errors import DeployError, TransportError

BACKEND = "UCX"
POLL_S = 0.0001
"""Between two looks at a write that is under way, or at notifications while some are awaited."""
PROOF_BYTES = 4096
_PROOF_S = 10.0
WriteState = Literal["under way", "done", "broken"]


_TLS_HINT = "check UCX_TLS, which must allow tcp or an RDMA transport, and UCX_NET_DEVICES; or unset them"
_PLUGIN_HINT = "point NIXL_PLUGIN_DIR at the folder with libplugin_UCX.so, or unset it"


def _load() -> ModuleType:
    """NIXL's package. Its import asks torch for a CUDA version; a process that has no torch must not get one by that.

    Raises:
        DeployError: it is not installed, or cannot be loaded.
    """
    without_torch = "torch" not in sys.modules
    if without_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what makes `import torch` fail at once
    try:
        module = importlib.import_module("nixl")
    except (ImportError, OSError) as error:
        fix = "pip install nixl in this environment"
        raise DeployError(f"NixlConnector needs NIXL, which cannot be imported ({error}): {fix}") from error
    finally:
        if without_torch:
            del sys.modules["torch"]
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return module


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes on a GPU that stay where they are until a write of them has ended."""

    address: int
    nbytes: int
    device: int
    """As CUDA numbers it in this process."""
    owner: object
    """What has to be kept for them to stay."""


class Write:
    """One write that was begun. Keep it, and the memory that it reads, until `state` says that it has ended."""

    def __init__(self, agent: "Agent", handle: object, registered: object) -> None:
        self._agent = agent
        self._handle = handle
        self._registered = registered
        self._state: WriteState = "under way"

    @property
    def state(self) -> WriteState:
        """How far it is; asking moves it on. Once it has ended everything that it held is given back."""
        if self._state == "under way":
            self._state = self._agent.state_of(self._handle)
            if self._state != "under way":
                self._agent.give_back(self._handle, self._registered)
        return self._state


class Agent:
    """A NIXL agent with the UCX backend and no progress thread, which would spin. Not thread-safe.

    Raises:
        DeployError: NIXL or UCX cannot be used; the message says which step failed and what to change.
    """

    def __init__(self, name: str, *, num_threads: int = 0) -> None:
        self.name = name
        self._nixl = _load()
        errors = vars(self._nixl._bindings).values()
        found = [error for error in errors if isinstance(error, type) and issubclass(error, Exception)]
        self._errors: tuple[type[Exception], ...] = (*found, RuntimeError)
        config = self._nixl.nixl_agent_config(backends=[BACKEND], enable_prog_thread=False, num_threads=num_threads)
        try:
            self._agent = self._nixl.nixl_agent(name, config)
        except RuntimeError as error:
            raise DeployError(f"NIXL finds no plugins: {_PLUGIN_HINT}") from error
        except self._errors as error:
            raise DeployError(f"NIXL cannot start its {BACKEND} backend ({error}): {_TLS_HINT}") from error
        if BACKEND not in self._agent.backends:
            others = ", ".join(sorted(self._agent.get_plugin_list()))
            raise DeployError(f"NIXL has no {BACKEND} plugin, only {others}: {_PLUGIN_HINT}")

    @contextmanager
    def _deploy_errors(self, what: str, fix: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise DeployError(f"{what} ({error}): {fix}") from error

    @contextmanager
    def _transport_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransportError(f"NIXL cannot {what}: {error}") from error

    @property
    def metadata(self) -> str:
        """What a peer needs to write into what is registered here, base64."""
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def register(self, view: memoryview) -> int:
        """Let peers write into this memory for as long as the agent lives; its address.

        Raises:
            DeployError: the system does not allow it.
        """
        address = address_of(view)
        limit = "raise the limit of locked memory (ulimit -l; for a container --ulimit memlock=-1)"
        with self._deploy_errors(f"NIXL cannot register {view.nbytes} bytes", limit):
            self._agent.register_memory([(address, view.nbytes, 0, "")], "DRAM")
        return address

    def add_peer(self, metadata: str) -> str:
        """Learn how to reach another agent; its name.

        Raises:
            TransportError: that is no metadata of a NIXL agent that we can reach.
        """
        try:
            raw = base64.b64decode(metadata, validate=True)
        except binascii.Error as error:
            raise TransportError("a landing's agent metadata is not base64") from error
        with self._transport_errors("read the metadata of a landing's agent"):
            name = self._agent.add_remote_agent(raw)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget_peer(self, name: str) -> None:
        """Close the connection to a peer. Writes to it that are under way end as broken."""
        with self._ignored():
            self._agent.remove_remote_agent(name)

    def write(self, peer: str, address: int, data: "memoryview | DeviceBytes", note: bytes) -> Write:
        """Begin to write `data` to `address` in the peer's memory; `note` arrives there after the last byte, if any.

        Without data the note alone is sent. Other threads run meanwhile. UCX must know CUDA to read `DeviceBytes`:
        one that does not takes the address for the host's, and the process ends.

        Raises:
            TransportError: it could not begin.
        """
        if not data.nbytes:
            with self._transport_errors("send a notification"):
                self._agent.send_notif(peer, note)
            return Write(self, None, None)
        kind, source = _place(data)
        with self._transport_errors("register what it sends"):
            registered = self._agent.register_memory([(*source, "")], kind)
        handle = None
        try:
            with self._transport_errors("write into a landing"):
                local = self._agent.get_xfer_descs([source], kind)
                remote = self._agent.get_xfer_descs([(address, data.nbytes, 0)], "DRAM")
                handle = self._agent.initialize_xfer("WRITE", local, remote, peer, note)
                self._agent.transfer(handle)
        except TransportError:
            self.give_back(handle, registered)
            raise
        return Write(self, handle, registered)

    def state_of(self, handle: object) -> WriteState:
        """For `Write`: how far it is."""
        if handle is None:
            return "done"
        try:
            said = self._agent.check_xfer_state(handle)
        except self._errors:
            return "broken"
        match said:
            case "DONE":
                return "done"
            case "PROC":
                return "under way"
            case _:
                return "broken"

    def give_back(self, handle: object, registered: object) -> None:
        """For `Write`: release what one write held."""
        with self._ignored():
            if handle is not None:
                self._agent.release_xfer_handle(handle)
        with self._ignored():
            if registered is not None:
                self._agent.deregister_memory(registered)

    @contextmanager
    def _ignored(self) -> Iterator[None]:
        """Giving up what the library has given up already is no fault."""
        try:
            yield
        except self._errors as error:
            logging.getLogger(__name__).debug("NIXL: %s", error)

    def move_on(self) -> None:
        """Move connections on, which NIXL does while it is asked for notifications."""
        with self._ignored():
            self.notes()

    def notes(self) -> list[bytes]:
        """Notifications that have come since the last call; asking also moves connections on."""
        return [note for notes in self._agent.get_new_notifs().values() for note in notes]

    def prove(self) -> None:
        """Write a page of our own memory to another page of it, with a notification.

        Raises:
            DeployError: it did not arrive.
        """
        pages = np.zeros(2 * PROOF_BYTES, np.uint8)
        pages[:PROOF_BYTES] = np.arange(PROOF_BYTES) % 251
        view = pages.data
        registered = self._agent.register_memory([(address_of(view), view.nbytes, 0, "")], "DRAM")
        with self._deploy_errors("NIXL's loop-back write failed", _TLS_HINT):
            local = self._agent.get_xfer_descs([(address_of(view), PROOF_BYTES, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(address_of(view) + PROOF_BYTES, PROOF_BYTES, 0)], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", local, remote, self.name, b"proof")
            self._agent.transfer(handle)
        write, limit, heard = Write(self, handle, registered), time.monotonic() + _PROOF_S, False
        while write.state == "under way" or not heard:
            heard = heard or b"proof" in self.notes()
            if write.state == "broken" or time.monotonic() > limit:
                raise DeployError(f"NIXL's loop-back write of {PROOF_BYTES} bytes did not arrive: {_TLS_HINT}")
            time.sleep(POLL_S)
        if bytes(pages[:PROOF_BYTES]) != bytes(pages[PROOF_BYTES:]):
            raise DeployError(f"NIXL's loop-back write of {PROOF_BYTES} bytes changed them: {_TLS_HINT}")


def ucx_knows_cuda() -> bool:
    """Whether the UCX of an agent of this process brought what reads GPU memory."""
    return "libuct_cuda" in Path("/proc/self/maps").read_text()


def _place(data: memoryview | DeviceBytes) -> tuple[str, tuple[int, int, int]]:
    """As NIXL's descriptors say it: kind of memory; address, bytes and device."""
    if isinstance(data, DeviceBytes):
        return "VRAM", (data.address, data.nbytes, data.device)
    return "DRAM", (address_of(data), data.nbytes, 0)


def address_of(view: memoryview) -> int:
    """Where a buffer of at least one byte begins, also of one that may only be read."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
