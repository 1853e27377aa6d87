"""Where the time of a job went: spans, and the header that carries their tree between services. Pure.

The trace of a job has the job's own 32 hex digits as its id. Times are Unix seconds by the clock of whoever measured.
"""

import re
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

TRACEPARENT = "traceparent"
"""W3C Trace Context: `00-<32 hex: trace>-<16 hex: parent span>-<flags>`."""
_FORM = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class Span(BaseModel):
    """One thing that took time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """16 hex digits."""
    parent: str | None = None
    """Span of which it is a part; None: the trace's root."""
    name: str
    process: str
    """As `ps` shows it: `diffusion-api`, `encoder-tp0`."""
    begin: float
    seconds: float


@dataclass(frozen=True)
class TraceParent:
    """Where in which trace something happens."""

    trace: str
    span: str

    def header(self) -> str:
        """The value of `traceparent`, sampled."""
        return f"00-{self.trace}-{self.span}-01"

    @classmethod
    def read(cls, header: str) -> "TraceParent | None":
        """What a header says; None where it is not in the form of W3C, or names nothing."""
        found = _FORM.fullmatch(header)
        if found is None or header.startswith("ff") or not (int(found[1], 16) and int(found[2], 16)):
            return None
        return cls(found[1], found[2])
