import re
from collections.abc import Iterator

import pytest

from shared_schema import errors
from shared_schema.errors import H3Error, PayloadError, RequestError


def below(kind: type[H3Error]) -> Iterator[type[H3Error]]:
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


def test_the_drawn_tree_is_the_tree() -> None:
    tree = (errors.__doc__ or "").split("\n\n")[1]
    drawn = {name for name in re.findall(r"[A-Z][A-Za-z0-9]+", tree) if hasattr(errors, name)}
    assert drawn - {"JobErrorCode"} == {kind.__name__ for kind in below(H3Error) if kind.__module__ == errors.__name__}


@pytest.mark.parametrize("kind", list(below(RequestError)))
def test_only_requests_are_the_callers_fault(kind: type[H3Error]) -> None:
    assert 400 <= kind.status < 500 or kind.status in (501, 503)


@pytest.mark.parametrize("kind", list(below(PayloadError)))
def test_a_broken_payload_is_a_server_fault_and_names_its_slot(kind: type[PayloadError]) -> None:  # case 43
    error = kind("broken", slot="embed.embedding")
    assert error.body().error.model_dump() == {
        "message": "broken",
        "type": "server_error",
        "param": "embed.embedding",
        "code": kind.default_code,
    }


def test_payload_errors_have_codes_of_their_own() -> None:
    codes = [kind.default_code for kind in below(PayloadError)]
    assert len(set(codes)) == len(codes)
