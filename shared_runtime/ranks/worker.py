"""A rank: takes orders from its API process, does them, and dies with it. Runs in the forked rank process; torch.

The main thread does `work` orders one after the other; a second thread does `side` orders (a push, a token count) so
that they need not wait for a clip. A third one ends what the main thread left of an order as its `Rest`. A fourth one
only reads the pipe: cancels arrive while work goes on, and the end of the pipe ends the process. Beats come from the
main thread alone: a rank that hangs in its work is silent.
"""

import gc
import logging
import os
import queue
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch

from shared_runtime.ranks.comm import RankComm, host_store, join_store
from shared_runtime.ranks.mesh import RankSpec
from shared_runtime.ranks.messages import (
    Beat,
    Cancel,
    Done,
    Failed,
    Hosting,
    Lane,
    Leave,
    Meet,
    Order,
    RankFacts,
    RankPipe,
    Ready,
    Report,
    Resting,
    Unfit,
)
from shared_runtime.tracing import Recorder, working_for
from shared_schema.errors import DeployError, H3Error, RankFailed, RequestError, TaskCancelled

logger = logging.getLogger(__name__)

IDLE_BEAT_S = 1.0
MIN_BEAT_GAP_S = 0.1
_NO_ROOM = re.compile(r'"aten::(new_)?empty\w*".*API call failed')
"""An allocation, in the words of torch's stable interface."""


class Beater:
    """Tells the API process that the main thread moves, at most ten times a second."""

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe
        self._last = 0.0

    def beat(self) -> None:
        """A point of progress was passed."""
        now = time.monotonic()
        if now - self._last >= MIN_BEAT_GAP_S:
            self._last = now
            self._pipe.send(Beat())


@dataclass
class TaskHandle:
    """What the code of a command sees of the outside."""

    number: int
    lane: Lane
    pipe: RankPipe
    beater: Beater
    comm: RankComm
    cancelled: threading.Event = field(default_factory=threading.Event)

    def report(self, event: object) -> None:
        """Tell the API process what happened; `event` is frozen, as everything that `commands.py` names."""
        self.pipe.send(Report(self.number, event))

    def beat(self) -> None:
        """A point of progress of this rank alone: a tile, a layer."""
        if self.lane == "work":
            self.beater.beat()

    def go_on(self) -> None:
        """A point of progress that all ranks pass together: raises `TaskCancelled` on all of them, or on none.

        For `work` a collective: every rank must call it equally often.
        """
        self.beat()
        wanted = not self.cancelled.is_set()
        if self.lane == "work":
            wanted = not self.comm.any(not wanted)
        if not wanted:
            raise TaskCancelled("cancelled")


@dataclass(frozen=True)
class Rest:
    """What is left of a command, ended beside the next one; in it nothing is a collective, and no device is used."""

    end: Callable[[], object]
    """Makes the result of the command."""


class RankService(Protocol):
    """What a service runs inside a rank."""

    @property
    def facts(self) -> RankFacts | None:
        """What this rank holds, for `Ready`."""

    def handle(self, command: object, task: TaskHandle) -> object:
        """Do one command of the service's `commands.py` and return its result, or for `work` what is left to it."""


class BuildService(Protocol):
    """Loads weights and returns the service of a rank; `beater` is to be used now and then while loading."""

    def __call__(self, comm: RankComm, settings: object, beater: Beater) -> RankService:
        """Build it.

        Raises:
            DeployError: files or settings are wrong; another try would not help.
        """


class Worker:
    """The loop of one rank."""

    def __init__(self, spec: RankSpec, pipe: RankPipe) -> None:
        self._spec = spec
        self._comm = RankComm(spec, torch_device(spec))
        self._meeting: queue.Queue[Meet] = queue.Queue()
        self._pipe = pipe
        self._beater = Beater(pipe)
        self._work: queue.Queue[tuple[Order, TaskHandle] | None] = queue.Queue()
        self._side: queue.Queue[tuple[Order, TaskHandle] | None] = queue.Queue()
        self._rests: queue.Queue[tuple[Order, Recorder, Rest] | None] = queue.Queue()
        self._handles: dict[int, TaskHandle] = {}

    def run(self, build: BuildService, settings: object) -> None:
        """Load, say so, then work until told to leave."""
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        try:
            self._connect()
            service = build(self._comm, settings, self._beater)
        except DeployError as error:
            self._pipe.send(Unfit(error.message, lasting=True))
            return
        except Exception as error:
            logger.exception("loading failed")
            ours = as_h3_error(error)
            self._pipe.send(Unfit(f"{self._spec.name} could not start: {ours.message}", lasting=False))
            return
        threading.Thread(target=self._serve, args=(service, self._side), name="side", daemon=True).start()
        resting = threading.Thread(target=self._end_rests, name="rest", daemon=True)
        resting.start()
        self._pipe.send(Ready(service.facts))
        self._serve(service, self._work, idle=self._beater.beat)
        self._rests.put(None)
        resting.join()

    def _connect(self) -> None:
        """Meet the other ranks, if there are any: the leader hosts, and the API process tells the others where."""
        size = self._spec.world_size
        if size == 1:
            return
        if self._spec.is_leader:
            store, port = host_store(self._spec.host, size)
            self._pipe.send(Hosting(port))
            self._comm.connect(self._spec.host, store)
        else:
            meet = self._meeting.get()
            self._comm.connect(meet.host, join_store(meet.host, meet.port, size))

    def _read(self) -> None:
        while True:
            message = self._pipe.receive()
            match message:
                case Order():
                    handle = TaskHandle(message.task, message.lane, self._pipe, self._beater, self._comm)
                    self._handles[message.task] = handle
                    (self._work if message.lane == "work" else self._side).put((message, handle))
                case Cancel(task):
                    wanted = self._handles.get(task)
                    if wanted is not None:
                        wanted.cancelled.set()
                case Meet():
                    self._meeting.put(message)
                case Leave():
                    self._work.put(None)
                case None:
                    os._exit(0)

    def _serve(
        self,
        service: RankService,
        orders: "queue.Queue[tuple[Order, TaskHandle] | None]",
        idle: Callable[[], None] | None = None,
    ) -> None:
        if self._comm.device.type == "cuda":
            # Each thread has a current device of its own, the first GPU until it is told.
            torch.cuda.set_device(self._comm.device)
        while True:
            try:
                item = orders.get(timeout=IDLE_BEAT_S)
            except queue.Empty:
                if idle is not None:
                    idle()
                continue
            if item is None:
                return
            order, handle = item
            recorder = Recorder(self._spec.name)
            answer = self._do(order, recorder, partial(service.handle, order.command, handle))
            if isinstance(answer, Failed):
                _forget()
            if isinstance(answer, Done) and isinstance(answer.result, Rest):
                self._pipe.send(Resting(order.task))
                self._rests.put((order, recorder, answer.result))
            else:
                self._answer(answer)

    def _end_rests(self) -> None:
        while (item := self._rests.get()) is not None:
            self._end_rest(*item)
            del item

    def _end_rest(self, order: Order, recorder: Recorder, rest: Rest) -> None:
        self._answer(self._do(order, recorder, rest.end, resting=True))

    def _answer(self, answer: Done | Failed) -> None:
        del self._handles[answer.task]
        self._pipe.send(answer)

    def _do(
        self, order: Order, recorder: Recorder, work: Callable[[], object], *, resting: bool = False
    ) -> Done | Failed:
        with working_for(order.errand, recorder):
            try:
                begun = time.perf_counter()
                result = work()
                logger.debug("%s took %.3f s", type(order.command).__name__, time.perf_counter() - begun)
                return Done(order.task, result, tuple(recorder.spans))
            except Exception as error:
                failure = replace(self._failed(order, error, resting=resting), spans=tuple(recorder.spans))
                _let_go(error)
                return failure

    def _failed(self, order: Order, error: Exception, *, resting: bool) -> Failed:
        ours = as_h3_error(error)
        if ours is not error:
            logger.exception("%s failed", type(order.command).__name__)
        # After any other exception nobody knows whether the other ranks still wait in a collective.
        agreed = self._comm.agreed(error) or isinstance(ours, RequestError | TaskCancelled)
        alone = self._spec.world_size == 1 or order.lane == "side" or resting
        fatal = isinstance(error, torch.AcceleratorError) or not (agreed or alone)
        return Failed(order.task, ours.with_traceback(None), fatal)


def as_h3_error(error: Exception) -> H3Error:
    """Map what a command raised into our tree; what belongs to it stays as it is."""
    match error:
        case H3Error():
            return error
        case _ if _out_of_memory(error):
            return RankFailed(str(error) or "out of memory", code="out_of_memory")
        case _:
            return RankFailed(f"{type(error).__name__}: {error}", code="internal_error")


def _out_of_memory(error: Exception) -> bool:
    """Kernels on torch's stable interface, such as FlashAttention-3, only say which call of theirs had no room."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _NO_ROOM.search(str(error)) is not None
    )


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that it came from: they hold what the failed work held."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _forget() -> None:
    """Give back what a failed command held, so that the next one finds the memory of a fresh rank."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rank_main(build: BuildService, spec: RankSpec, settings: object, end: socket.socket) -> None:
    """The life of a rank process, from fork to exit."""
    Worker(spec, RankPipe(end)).run(build, settings)


def torch_device(spec: RankSpec) -> torch.device:
    """The device of a rank, made current where there is one to choose."""
    if spec.device == "cpu":
        return torch.device("cpu")
    # As the management library numbers them, which the API process asked; CUDA by itself puts the fastest first.
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    device = torch.device("cuda", int(spec.device))
    torch.cuda.set_device(device)
    return device
