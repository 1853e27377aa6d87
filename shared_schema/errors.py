"""Every error that crosses a boundary of ours, as one tree, and the body that carries it over HTTP.

    H3Error
    |- RequestError          the caller's fault, found before a job exists
    |  |- InvalidRequest       400  a field or a file breaks a rule; `param` names it
    |  |- NotServed            400  a known field that this server does not serve (yet)
    |  |- ModelNotFound        400  `model` is not a served name
    |  |- Unauthorized         401  no key, or one that this server does not know
    |  |- Forbidden            403  a key that may not do this
    |  |- NotFound             404  no such job, content or route
    |  |- Conflict             409  the same idempotency key with another body
    |  |- TooLarge             413  a body, part or `data:` URL over its byte cap
    |  |- UnsupportedType      415  the request's own Content-Type
    |  |- QueueFull            429  no job was made; try again later
    |  |- KeyBusy              429  the caller's key has as many unfinished jobs as it may
    |  |- RateLimited          429  this caller sends more than it may
    |  |- NotImplementedYet    501  a route that we know and do not serve
    |  `- NotReady             503  no capacity at present
    |- EncoderAway         503  the encoder service does not answer: it has not begun what it was asked for
    |- StoreUnavailable      503  the database of the jobs does not answer
    |- JobFailed             a job ended without a clip; `code` is one of `JobErrorCode`
    |- PayloadError          an `encoder_output` breaks its contract: a server fault, never the client's
    |  |- UnknownSchema, SlotMissing, SlotUnexpected, WrongDtype, WrongShape, WrongBytes,
    |  |- LayoutInvalid, RowsMismatch, BadRoles, NotFinite, WrongRequest,
    |  `- ChecksumMismatch, LeaseExpired
    |- TransportError        a landing could not be reserved or written
    |  |- SlabFull             no room now: the push waits
    |  |  `- ReceiverBusy        room is not what is missing: nothing need be given up for it
    |  `- StorageUnavailable   the store of inputs and clips does not answer
    |- OutboundError         a URL of the caller's could not be used
    |  |- OutboundRefused      this server does not dial it: scheme, host or address
    |  `- OutboundFailed       nobody answered there, or not in time, or not as it should
    |- RankDied              a rank left, was stopped, or hung past its limit
    |- RankFailed            a command raised; `code` is one of `JobErrorCode`
    |- TaskCancelled         a command was not wanted any more
    |- AdapterError          a LoRA file cannot be used: wrong settings at start, the caller's fault in a request
    |  |- AdapterNotFound      no such file, or not exactly one where one is expected
    |  |- AdapterNotServed     a file whose name or form is not read here
    |  |- AdapterBroken        no whole safetensors file, or values that are not finite
    |  `- AdapterUnbound       tensors that do not bind to the transformer, each exactly once
    `- DeployError           wrong settings: the process prints one line and exits 2

Foreign exceptions are mapped into this tree once, at the boundary where they appear, with `from`.
"""

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

JobErrorCode = Literal[
    "invalid_input",
    "out_of_memory",
    "encoder_unavailable",
    "transfer_failed",
    "worker_died",
    "numerical_error",
    "timeout",
    "cancelled",
    "internal_error",
]
"""Why a job failed. Only `worker_died` and `transfer_failed` are retried, once."""


class ErrorDetail(BaseModel):
    """The inside of an error body, in the form of the OpenAI API."""

    model_config = ConfigDict(frozen=True)

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """`{"error": {...}}`: the body of every answer that is not a success."""

    model_config = ConfigDict(frozen=True)

    error: ErrorDetail


class H3Error(Exception):
    """Root of the tree. `str(error)` is the message for the caller."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    retry_after_s: float | None = None
    """When it makes sense to try again."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code

    def __reduce__(self) -> "tuple[object, ...]":
        return _revive, (type(self), self.__dict__.copy())

    def body(self) -> ErrorBody:
        """This error as the body of an HTTP answer."""
        detail = ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorBody(error=detail)


def _revive(kind: type[H3Error], state: dict[str, object]) -> H3Error:
    """Rebuild an error that crossed a rank pipe, whatever its constructor takes."""
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class RequestError(H3Error):
    """The caller's fault."""

    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class InvalidRequest(RequestError):
    """A field or a file breaks a rule; `param` names it."""


class NotServed(RequestError):
    """A known field whose capability this server does not have."""

    default_code = "not_served"


class ModelNotFound(RequestError):
    """`model` is not a name under which this server serves."""

    default_code = "model_not_found"


class Unauthorized(RequestError):
    """No key, or one that this server does not know."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """A key that this server knows and that may not do this."""

    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFound(RequestError):
    """No such job, content or route."""

    status = 404
    default_code = "not_found"


class Conflict(RequestError):
    """The same `Idempotency-Key` came with another body."""

    status = 409
    default_code = "idempotency_conflict"


class TooLarge(RequestError):
    """A body, part or `data:` URL is over its byte cap."""

    status = 413
    default_code = "too_large"


class UnsupportedType(RequestError):
    """The request's own Content-Type is not read here."""

    status = 415
    default_code = "unsupported_media_type"


class QueueFull(RequestError):
    """The queue is full; no job was made."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"
    retry_after_s = 5.0


class RateLimited(RequestError):
    """This caller sends more than it may; no job was made."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limited"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KeyBusy(RequestError):
    """The caller's key has as many unfinished jobs as it may; no job was made."""

    status = 429
    type = "rate_limit_error"
    default_code = "key_busy"
    retry_after_s = 5.0


class NotImplementedYet(RequestError):
    """A route of the OpenAI API that is known and not served."""

    status = 501
    default_code = "not_implemented"


class NotReady(RequestError):
    """The service cannot do this now; the caller may try again."""

    status = 503
    type = "server_error"
    default_code = "not_ready"
    retry_after_s = 5.0


class EncoderAway(H3Error):
    """The encoder service does not answer: it has not begun what it was asked for."""

    status = 503
    default_code = "encoder_unavailable"


class StoreUnavailable(H3Error):
    """The database of the jobs does not answer, or does not take what is written; nothing was changed."""

    status = 503
    default_code = "store_unavailable"
    retry_after_s = 5.0


class JobFailed(H3Error):
    """A job ended without a clip. `code` is one of `JobErrorCode`."""

    def __init__(self, message: str, *, code: JobErrorCode, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)


class PayloadError(H3Error):
    """An `encoder_output` breaks its contract. `slot` names the slot and `param` repeats it."""

    default_code = "payload_invalid"

    def __init__(self, message: str, *, slot: str | None = None) -> None:
        super().__init__(message, param=slot)
        self.slot = slot


class UnknownSchema(PayloadError):
    """Schema id or layout version that this program does not read."""

    default_code = "payload_unknown_schema"


class SlotMissing(PayloadError):
    """A slot that the schema demands is not there."""

    default_code = "payload_slot_missing"


class SlotUnexpected(PayloadError):
    """A slot that the schema does not know."""

    default_code = "payload_slot_unexpected"


class WrongDtype(PayloadError):
    """A slot's element type is not the schema's."""

    default_code = "payload_wrong_dtype"


class WrongShape(PayloadError):
    """A slot's rank or extents are not the schema's."""

    default_code = "payload_wrong_shape"


class WrongBytes(PayloadError):
    """A slot holds fewer or more bytes than its dtype and shape say."""

    default_code = "payload_wrong_bytes"


class LayoutInvalid(PayloadError):
    """The packed layout contradicts itself or a rule of the model."""

    default_code = "payload_layout_invalid"


class RowsMismatch(PayloadError):
    """Visual, audio or text rows are not as many as the layout implies."""

    default_code = "payload_rows_mismatch"


class BadRoles(PayloadError):
    """A token role is neither 0 (vision) nor 1 (text)."""

    default_code = "payload_bad_roles"


class NotFinite(PayloadError):
    """A value is NaN or infinite."""

    default_code = "payload_not_finite"


class WrongRequest(PayloadError):
    """The bytes belong to another request or another generation of the landing."""

    default_code = "payload_wrong_request"


class ChecksumMismatch(PayloadError):
    """The bytes that arrived are not the bytes that were sent."""

    default_code = "payload_checksum"


class LeaseExpired(PayloadError):
    """The landing or the encoding lapsed before it was used."""

    status = 410
    default_code = "lease_expired"


class TransportError(H3Error):
    """A landing could not be reserved, opened or written."""

    status = 503
    default_code = "transfer_failed"


class SlabFull(TransportError):
    """The slab has no room for this payload now."""

    default_code = "slab_full"


class ReceiverBusy(SlabFull):
    """Nothing can be received for a moment, however much room there is."""

    default_code = "receiver_busy"


class OutboundError(H3Error):
    """A URL of the caller's could not be used. Who dials says what that means for the caller."""


class OutboundRefused(OutboundError):
    """This server does not dial it."""

    default_code = "outbound_refused"


class OutboundFailed(OutboundError):
    """Nobody answered there, or not in time, or not as it should."""

    default_code = "outbound_failed"


class StorageUnavailable(TransportError):
    """The store of inputs and clips does not answer, or refuses."""

    default_code = "storage_unavailable"
    retry_after_s = 5.0


class RankDied(H3Error):
    """A rank left, was stopped, or hung past its limit; its group was ended."""

    status = 503
    default_code = "worker_died"


class RankFailed(H3Error):
    """A command raised something that is not of this tree. `code` is one of `JobErrorCode`."""

    def __init__(self, message: str, *, code: JobErrorCode) -> None:
        super().__init__(message, code=code)


class TaskCancelled(H3Error):
    """A command was stopped at its next step because its caller went away."""

    default_code = "cancelled"


class AdapterError(H3Error):
    """A LoRA file cannot be used."""

    default_code = "adapter_invalid"


class AdapterNotFound(AdapterError):
    """No such file, or not exactly one where one is expected."""

    default_code = "adapter_not_found"


class AdapterNotServed(AdapterError):
    """A file whose name or form is not read here."""

    default_code = "adapter_not_served"


class AdapterBroken(AdapterError):
    """No whole safetensors file, or values that are not finite."""

    default_code = "adapter_broken"


class AdapterUnbound(AdapterError):
    """Tensors that do not bind to the transformer, each exactly once."""

    default_code = "adapter_unbound"


class DeployError(H3Error):
    """Wrong settings. The message names file and key and says what to change."""

    default_code = "deploy_invalid"
