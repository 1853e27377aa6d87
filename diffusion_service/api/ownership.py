"""Whose job it is, and who else may see or change it. Runs in the API process."""

from starlette.requests import Request

from diffusion_service.api.gate import caller_of
from diffusion_service.jobs.job import Job
from diffusion_service.keys import Caller
from shared_schema.errors import Forbidden, NotFound


def check_visible(request: Request, job: Job) -> None:
    """Whether the caller may know of this job at all: its own, or every one with `read_all`.

    Raises:
        NotFound: as if there were no such job.
        Forbidden: the key only creates.
    """
    caller = caller_of(request)
    if not _owns(caller, job) and not caller.may("read_all"):
        raise NotFound(f"there is no video {job.id!a}", param="video_id")
    if request.method in ("GET", "HEAD") and not caller.may("read_own"):
        raise Forbidden("this key may not do that: it lacks the scope read_own")


def check_changes(request: Request, job: Job) -> None:
    """Whether the caller may end or remove this job: its own with `create`, every one with `admin`.

    Raises:
        Forbidden: it may not.
    """
    caller = caller_of(request)
    if not caller.may("admin") and not (_owns(caller, job) and caller.may("create")):
        raise Forbidden("this key may not change that job")


def _owns(caller: Caller, job: Job) -> bool:
    return job.key == caller.name
