"""Kinds of value that a deploy file knows besides plain ones: device lists, and keys with one legal value. Pure."""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer

CPU = "cpu"
T = TypeVar("T")


class Settings(BaseModel):
    """Base of every block of a deploy file: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def only(value: T, reason: str) -> AfterValidator:
    """A validator for a key that is read so that files load, and that has one legal value here."""

    def check(given: T) -> T:
        if given != value:
            raise ValueError(f"must be {_spelled(value)}: {reason}")
        return given

    return AfterValidator(check)


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _split_devices(given: object) -> object:
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    return parse_devices(given) if isinstance(given, str) else given


def parse_devices(text: str) -> tuple[str, ...]:
    """One device a rank: `0,1` (indices into CUDA_VISIBLE_DEVICES) or `cpu,cpu`.

    Raises:
        ValueError: neither indices alone nor `cpu` alone, or an index twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    if all(name == CPU for name in names):
        return names
    if not all(name.isascii() and name.isdigit() for name in names):
        raise ValueError(f"lists GPU indices or `cpu`, separated by commas, not {text!r}")
    if len(set(map(int, names))) != len(names):
        raise ValueError(f"names a GPU twice: {text!r}")
    return tuple(str(int(name)) for name in names)


Devices = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_devices),
    PlainSerializer(lambda names: ",".join(names), return_type=str),
]
