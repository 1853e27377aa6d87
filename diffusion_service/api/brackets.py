"""Names with brackets, as forms write nested values: `a[b]`, `a[]`, `a[0][b]`. Pure; runs in the API process.

The OpenAI SDK flattens a list of objects column by column (`a[][x]` of every element, then `a[][y]`), other clients
row by row. Both mean the same as long as every element has every key; where one lacks some, no reading is safe.
"""

import re
from collections import Counter
from dataclasses import dataclass

from diffusion_service.api.forms import Json, Value
from shared_schema.errors import InvalidRequest

_NAME = re.compile(r"([^\[\]]{1,64})((?:\[[^\[\]]{0,64}\]){0,4})")
_KEY = re.compile(r"\[([^\[\]]*)\]")
_INDEX = re.compile(r"[0-9]{1,2}")
Key = str | int


@dataclass(frozen=True)
class Entry:
    """One value and where it belongs inside its field: `a[0][b]` is field `a`, keys `(0, "b")`."""

    field: str
    keys: tuple[Key, ...]
    value: Value


def read_names(entries: tuple[tuple[str, Value], ...]) -> list[Entry]:
    """Entries with their names taken apart; `[]` becomes the index that its place gives it.

    Raises:
        InvalidRequest: a name that cannot be read, or a list of objects that has no safe reading.
    """
    seen: Counter[str] = Counter()
    read = []
    for name, value in entries:
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidRequest(f"unknown field {name[:200]!a}", param=name[:200])
        keys = tuple(_key(key, seen[name]) for key in _KEY.findall(match[2]))
        seen[name] += 1
        read.append(Entry(match[1], keys, value))
    _check_columns(seen)
    return read


def _key(text: str, place: int) -> Key:
    if text == "":
        return place
    return int(text) if _INDEX.fullmatch(text) else text


def _check_columns(seen: Counter[str]) -> None:
    columns: dict[str, set[int]] = {}
    for name, count in seen.items():
        head, brackets, rest = name.partition("[][")
        if brackets and rest:
            columns.setdefault(head, set()).add(count)
    for head, counts in columns.items():
        if len(counts) > 1:
            raise InvalidRequest(f"{head}[]: not every element has every key; write {head}[0], {head}[1]", param=head)


def nest(entries: list[tuple[tuple[Key, ...], Json]], param: str) -> Json:
    """One value from the values inside it.

    Raises:
        InvalidRequest: they do not fit together, or one is given twice with different values.
    """
    if all(keys == () for keys, _ in entries):
        first = entries[0][1]
        if any(value != first for _, value in entries):
            raise InvalidRequest(f"{param} is given more than once, with different values", param=param)
        return first
    if any(keys == () for keys, _ in entries):
        raise InvalidRequest(f"{param} is given as one value and in parts", param=param)
    parts: dict[Key, list[tuple[tuple[Key, ...], Json]]] = {}
    for keys, value in entries:
        parts.setdefault(keys[0], []).append((keys[1:], value))
    if all(isinstance(key, int) for key in parts):
        return [nest(parts[key], f"{param}[{key}]") for key in sorted(parts, key=int)]
    if any(isinstance(key, int) for key in parts):
        raise InvalidRequest(f"{param} is a list and an object at once", param=param)
    return {str(key): nest(inside, f"{param}.{key}") for key, inside in parts.items()}
