"""The file of API keys: what it holds, whom it knows, and how it changes under a service that runs."""

import itertools
import json
import stat
import threading
from pathlib import Path

import pytest

from diffusion_service.keys import SCOPES, Caller, KeyRing, Scope, add_key, read_keys, remove_key
from shared_schema.errors import DeployError


def test_a_key_is_known_and_its_file_does_not_hold_it(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, two = add_key(file, "one", ("create",)), add_key(file, "two", ("read_all",))
    assert one != two
    assert one not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ring = KeyRing(file)
    assert ring.find(one) == Caller("one", frozenset({"create"}))
    assert ring.find(two) == Caller("two", frozenset({"read_all"}))
    for wrong in ("", one[:-1], one + "x", two.upper(), "\udcff"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("create", {"create"}),
        ("read_own", {"read_own"}),
        ("read_all", {"read_own", "read_all"}),
        ("admin", set(SCOPES)),
    ],
)
def test_what_a_scope_allows(scope: Scope, allowed: set[Scope]) -> None:
    caller = Caller("x", frozenset({scope}))
    assert {each for each in SCOPES if caller.may(each)} == allowed


def test_a_change_of_the_file_counts_within_a_second(tmp_path: Path) -> None:
    file, now = tmp_path / "keys.json", 0.0
    old = add_key(file, "old", ("create",))
    ring = KeyRing(file, lambda: now)
    new = add_key(file, "new", ("create",))
    remove_key(file, "old")
    assert ring.find(old) is not None
    now = 1.0
    assert (ring.find(old), ring.find(new)) == (None, Caller("new", frozenset({"create"})))


@pytest.mark.parametrize("text", ["", "{", '{"keys": [{"name": "a"}]}', None])
def test_a_file_that_breaks_leaves_the_keys_that_were_read(tmp_path: Path, text: str | None) -> None:
    file, now = tmp_path / "keys.json", 0.0
    key = add_key(file, "a", ("create",))
    ring = KeyRing(file, lambda: now)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    now = 1.0
    assert ring.find(key) is not None
    assert ring.broken is not None
    file.unlink(missing_ok=True)
    other = add_key(file, "b", ("create",))
    now = 2.0
    assert (ring.find(key), ring.broken) == (None, None)
    assert ring.find(other) is not None


def test_a_file_that_breaks_is_complained_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    key = add_key(file, "a", ("create",))
    ring = KeyRing(file, itertools.count().__next__)
    file.write_text("{")
    assert all(ring.find(key) is not None for _ in range(3))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "Invalid JSON"),
        ('{"keys": [{"name": "a", "scopes": [], "sha256": "0", "created_at": 0}]}', "keys.0.scopes"),
        ('{"keys": [{"name": "a", "scopes": ["root"], "sha256": "0", "created_at": 0}]}', "keys.0.scopes.0"),
        ('{"key": []}', "key "),
    ],
)
def test_a_file_that_is_none_is_refused_at_start(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(DeployError, match=r"service\.keys_file") as caught:
        KeyRing(file)
    assert says in caught.value.message


def test_a_file_that_is_not_there_says_what_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="keys add"):
        KeyRing(tmp_path / "keys.json")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="cannot be written"):
        add_key(tmp_path / "missing" / "keys.json", "a", ("create",))


def test_names_are_names_and_taken_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "a", ("create",))
    for name in ("a", "", "a b", "a\n", "x" * 65, "ü"):
        with pytest.raises(DeployError):
            add_key(file, name, ("create",))
    with pytest.raises(DeployError, match="no key named b"):
        remove_key(file, "b")
    double = json.loads(file.read_text())
    file.write_text(json.dumps({"keys": double["keys"] * 2}))
    with pytest.raises(DeployError, match="twice"):
        read_keys(file)


def test_keys_added_at_once_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    threads = [threading.Thread(target=add_key, args=(file, f"k{n}", ("create",))) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(file).keys} == {f"k{n}" for n in range(10)}
