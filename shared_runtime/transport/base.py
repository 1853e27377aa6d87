"""What a transport is: the receiver owns memory and hands out landings, the sender pushes into them. No torch.

A transport brings both sides for its kind of landing. Shared memory: `slab.Slab` and `shm.ShmSender`. NIXL keeps the
same slab, registered once: `nixl_receiver.NixlReceiver`, and `nixl_sender.NixlSender` writes with a notification.

A third one also needs
  its landing in `shared_schema/encode.py` (one that ranks read like a slab's), and its name in `EncoderIdentity` there;
  its connector in `shared_schema/deploy/model.py`, the options that it uses in `deploy/served.py`;
  the receiver in `diffusion_service/app.py` (`_receiver`), what else an encoder is told in `encoder_link.py`;
  the sender in `encoder_service/worker.py` (`_outbox`), `outbox.py`, `commands.py`; its proof in both `cli.py`;
  its name in `accounts.py`, and its package in `tests/test_architecture.py`.
"""

from typing import Literal, Protocol, TypeVar

from shared_schema.encode import Landing, NixlLanding, PushReceipt, ShmLanding
from shared_schema.encoder_output import EncoderOutput

L = TypeVar("L", bound=ShmLanding)
L_contra = TypeVar("L_contra", bound=ShmLanding | NixlLanding, contravariant=True)


class Source(Protocol):
    """Bytes that are not in host memory yet, and go from where they are straight into a landing."""

    @property
    def nbytes(self) -> int:
        """How many."""

    def write_into(self, target: memoryview) -> str:
        """Fill `target`, of just that many bytes; the checksum of what lies there then."""


class Sender(Protocol[L_contra]):
    """The encoder leader's side."""

    def push(self, landing: L_contra, payload: EncoderOutput, *, checksum: str | None = None) -> PushReceipt:
        """Write the payload into its landing; `checksum` is the payload's where it has been made already.

        Raises:
            LeaseExpired, WrongRequest, TransportError.
        """

    def push_bytes(self, landing: L_contra, data: memoryview, *, checksum: str | None = None) -> PushReceipt:
        """The same for bytes that are no payload: the probe of the way."""

    def forget_removed(self) -> None:
        """Let go of memory whose owner is gone."""

    def close(self) -> None:
        """Let go of everything."""


class Receiver(Protocol[L]):
    """The diffusion service's side. Times are Unix seconds."""

    @property
    def kind(self) -> Literal["shm", "nixl"]:
        """How others reach it, for metrics."""

    def reserve(self, length: int, request_id: str, lease_s: float, now: float) -> L:
        """Set room aside.

        Raises:
            SlabFull: not now; ReceiverBusy: not now, but not for want of room. TransportError: never.
        """

    def for_sender(self, landing: L) -> Landing:
        """What the sender is told of this landing. From here on it may write.

        Raises:
            TransportError: nobody can be told now.
        """

    @property
    def trouble(self) -> str | None:
        """Why nothing can be received now, for readiness; None while all is well."""

    def verify(self, landing: L, checksum: str) -> None:
        """Prove a finished push, and end its lease."""

    def view(self, landing: L) -> memoryview:
        """The payload's bytes."""

    def release(self, landing: L) -> None:
        """Give the memory back; harmless when repeated."""

    def expire(self, now: float) -> list[L]:
        """End leases that have passed."""

    def close(self) -> None:
        """Give everything back."""
