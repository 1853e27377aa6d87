"""Why a job failed, in the codes that its caller is told. Pure."""

from diffusion_service.jobs.job import JobFailure
from shared_schema.errors import (
    EncoderAway,
    H3Error,
    JobFailed,
    PayloadError,
    RankDied,
    RankFailed,
    RequestError,
    TransportError,
)


def failure_of(error: Exception) -> JobFailure:
    """The failure that an error of a job's work means."""
    match error:
        case JobFailed() | RankFailed():
            return JobFailure(code=error.code, message=error.message, param=error.param)
        case RankDied():
            return JobFailure(code="worker_died", message=error.message)
        case EncoderAway():
            return JobFailure(code="encoder_unavailable", message=error.message)
        case PayloadError() | TransportError():
            return JobFailure(code="transfer_failed", message=error.message)
        case RequestError() if error.status < 500:
            return JobFailure(code="invalid_input", message=error.message, param=error.param)
        case H3Error():
            return JobFailure(code="encoder_unavailable", message=error.message)
        case _:
            return JobFailure(code="internal_error", message=f"{type(error).__name__}: {error}")
