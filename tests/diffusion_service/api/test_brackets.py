"""Names with brackets, read the way that no client can misunderstand."""

import pytest

from diffusion_service.api.brackets import nest, read_names
from diffusion_service.api.forms import Json
from shared_schema.errors import InvalidRequest


def nested(*entries: tuple[str, Json]) -> Json:
    """What the entries of one field make together."""
    read = read_names(entries)
    return nest([(entry.keys, entry.value) for entry in read], read[0].field)  # type: ignore[misc]


def test_nested_names_become_objects_and_lists() -> None:
    assert nested(("a", "1")) == "1"
    assert nested(("a[b]", "1"), ("a[c][d]", "2")) == {"b": "1", "c": {"d": "2"}}
    assert nested(("a[f][]", "0"), ("a[f][]", "-1")) == {"f": ["0", "-1"]}
    assert nested(("a[1]", "x"), ("a[0]", "y")) == ["y", "x"]


def test_row_by_row_and_column_by_column_mean_the_same() -> None:
    rows = [("a[][u]", "1"), ("a[][v]", "2"), ("a[][u]", "3"), ("a[][v]", "4")]
    columns = [rows[0], rows[2], rows[1], rows[3]]
    assert nested(*rows) == nested(*columns) == [{"u": "1", "v": "2"}, {"u": "3", "v": "4"}]


def test_a_list_with_gaps_has_no_safe_reading() -> None:
    with pytest.raises(InvalidRequest) as caught:
        nested(("a[][u]", "1"), ("a[][u]", "2"), ("a[][v]", "3"))
    assert caught.value.param == "a"
    assert nested(("a[0][u]", "1"), ("a[1][u]", "2"), ("a[1][v]", "3")) == [{"u": "1"}, {"u": "2", "v": "3"}]


def test_a_value_given_twice_must_agree() -> None:
    assert nested(("a", "1"), ("a", "1")) == "1"
    for entries in ([("a", "1"), ("a", "2")], [("a[b]", "1"), ("a[b]", "2")], [("a", "1"), ("a[b]", "1")]):
        with pytest.raises(InvalidRequest):
            nested(*entries)
    with pytest.raises(InvalidRequest, match="at once"):
        nested(("a[0]", "1"), ("a[b]", "1"))


@pytest.mark.parametrize("name", ["", "[a]", "a[", "a]b", "a[b]c", "a[[b]]", "a[b][c][d][e][f]", "x" * 65])
def test_a_name_that_cannot_be_read_is_unknown(name: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown field"):
        read_names(((name, "1"),))
