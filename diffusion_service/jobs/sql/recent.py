"""The jobs that were read or written last, for a store that alone writes its database. Runs in the API process.

A thousand clients that poll a handful of jobs then cost no transaction each. Entries are put by the store's one thread,
in the order of its transactions, so that nobody reads a state older than one he has seen.
"""

import threading
from collections import OrderedDict

from diffusion_service.jobs.job import Job

KEPT = 1024


class RecentJobs:
    """At most `KEPT` jobs by id; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, job_id: str) -> Job | None:
        """The job, if it is here."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                self._jobs.move_to_end(job_id)
            return job

    def put(self, job: Job) -> None:
        """This is the job's state now."""
        with self._lock:
            self._jobs[job.id] = job
            self._jobs.move_to_end(job.id)
            if len(self._jobs) > KEPT:
                self._jobs.popitem(last=False)

    def drop(self, job_id: str) -> None:
        """What is here of that job may be wrong."""
        with self._lock:
            self._jobs.pop(job_id, None)

    def clear(self) -> None:
        """Anything here may be wrong."""
        with self._lock:
            self._jobs.clear()
