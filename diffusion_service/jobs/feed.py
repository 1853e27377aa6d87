"""How everything in the diffusion API process hears that a job changed.

It says which job; what changed is in the store. Changes of this process are told at once. Those of other services on
the same database are found by asking the store for its newest revisions, once for all who wait.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from diffusion_service.jobs.store import JobStore
from shared_schema.errors import StoreUnavailable

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""How often the store is asked for changes that others made."""
RECHECK_S = 5.0
"""How often every watched job counts as changed: a job that another service removed leaves no event."""


class Watch:
    """One who waits for changes of one job."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._closed = False

    async def changed(self) -> bool:
        """Wait until the job changed since the last call, or since the watch began. False: no more will come."""
        await self._told.wait()
        if self._closed:
            return False
        self._told.clear()
        return True

    def tell(self) -> None:
        """The job changed."""
        self._told.set()

    def close(self) -> None:
        """No more will come."""
        self._closed = True
        self._told.set()


class JobFeed:
    """Tells those who watch a job that it changed. All of it runs in the event loop's thread."""

    def __init__(self) -> None:
        self._watches: defaultdict[str, set[Watch]] = defaultdict(set)
        self._closed = False

    def tell(self, job_id: str) -> None:
        """The store has a change of this job."""
        for watch in self._watches.get(job_id, ()):
            watch.tell()

    @contextmanager
    def watch(self, job_id: str) -> Iterator[Watch]:
        """Hear of every change from here on. Read the store after this call, and after each `changed`."""
        watch = Watch()
        if self._closed:
            watch.close()
        self._watches[job_id].add(watch)
        try:
            yield watch
        finally:
            self._watches[job_id].discard(watch)
            if not self._watches[job_id]:
                del self._watches[job_id]

    async def follow(self, store: JobStore) -> None:
        """Tell what other services change, until cancelled."""
        clock = asyncio.get_running_loop().time
        revision, rechecked = None, clock()
        while True:
            await asyncio.sleep(POLL_S)
            if not self._watches:
                revision = None
                continue
            try:
                news = await store.changes(revision)
            except StoreUnavailable as error:
                logger.warning("changes of other services are not seen now: %s", error)
                continue
            changed: Iterable[str] = news.jobs
            if revision is None or clock() - rechecked >= RECHECK_S:
                # What changed since the first watch began is not known either.
                rechecked, changed = clock(), tuple(self._watches)
            revision = news.revision
            for job_id in changed:
                self.tell(job_id)

    def close(self) -> None:
        """The service ends: everyone who waits is let go."""
        self._closed = True
        for watches in self._watches.values():
            for watch in watches:
                watch.close()
