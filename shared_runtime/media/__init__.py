"""Uploaded files: what they are, whether they may be used, and what they hold. Runs in API processes' worker threads
and in encoder ranks; no torch.

Every function may be given hostile bytes: sizes are capped before memory is spent, decoding stops at its limit, and
nothing but `InvalidRequest` leaves.
"""

from shared_runtime.media.formats import classify
from shared_runtime.media.header import read_header
from shared_runtime.media.image import decode_image
from shared_runtime.media.probe import Probe, check_totals, probe
from shared_runtime.media.sound import decode_audio
from shared_runtime.media.video import DecodedVideo, decode_video

__all__ = [
    "DecodedVideo",
    "Probe",
    "check_totals",
    "classify",
    "decode_audio",
    "decode_image",
    "decode_video",
    "probe",
    "read_header",
]
