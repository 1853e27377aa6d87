"""The audit line of a job that has ended: whose it was and what it used. Runs in the diffusion API process."""

import logging

from diffusion_service.jobs.job import Job

AUDIT = logging.getLogger("diffusion_service.audit")
"""Ids and names of keys; never a prompt and never a file's name."""


def log_end(job: Job, *, encoder_ranks: int, diffusion_ranks: int) -> None:
    """One line for a job that is final."""
    used = gpu_seconds(job, encoder_ranks=encoder_ranks, diffusion_ranks=diffusion_ranks)
    AUDIT.info("key=%s job=%s end=%s gpu_seconds=%.3f", job.key or "-", job.id, job.status, used)


def gpu_seconds(job: Job, *, encoder_ranks: int, diffusion_ranks: int) -> float:
    """Seconds of ranks that the job's last attempt took: of the encoder's, and of the diffusion service's.

    What another job had encoded costs nothing, nor does the file that is finished while the ranks make the next job.
    A job that did not complete is counted from its start.
    """
    durations = job.stage_durations
    encoding = 0.0 if job.conditioning_cache == "hit" else durations.get("encode", 0.0)
    return encoding * encoder_ranks + _made_s(job, encoding) * diffusion_ranks


def _made_s(job: Job, encoding: float) -> float:
    if job.result is not None:
        return sum(seconds for stage, seconds in job.result.stage_durations.items() if stage != "mux")
    if job.phase not in ("denoising", "decoding", "muxing") or job.started_at is None or job.completed_at is None:
        return 0.0
    return max(job.completed_at - job.started_at - encoding, 0.0)
