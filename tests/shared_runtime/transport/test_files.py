"""Making, sweeping and opening slab files: with dead owners, full disks, wrong folders and other users."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared_runtime.transport.files import SlabFolder, create_slab_file, sweep
from shared_runtime.transport.slab import Slab
from shared_schema.errors import DeployError, TransportError
from tests.shared_runtime.transport.processes import child

MIB = 2**20
NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount or to become another user")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mounted)], check=False)
    if made.returncode:
        pytest.skip("no mounts here")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def test_a_slab_is_a_private_file_of_its_whole_size(folder: Path) -> None:
    before = free_bytes(folder)
    slab = Slab.create(folder / "new", MIB, "test")
    facts = slab.path.stat()
    assert (facts.st_mode & 0o777, facts.st_size, facts.st_blocks * 512) == (0o600, MIB, MIB)
    slab.close()
    assert list((folder / "new").iterdir()) == []
    assert free_bytes(folder) == pytest.approx(before, abs=MIB // 2)


def test_two_slabs_of_living_owners_stand_side_by_side(folder: Path) -> None:
    first = Slab.create(folder, MIB, "test")
    second = Slab.create(folder, MIB, "test")
    assert first.path.exists()
    assert first.path != second.path
    first.close()
    assert second.path.exists()
    second.close()


def test_a_killed_owners_slab_is_swept_by_the_next_start(folder: Path) -> None:  # cases 46, 48
    before = free_bytes(folder)
    for _ in range(3):
        with child("own", folder, 16 * MIB) as owner:
            path = Path(owner.hear())
            assert path.exists()
            assert sweep(folder) == []
            owner.process.send_signal(signal.SIGKILL)
            owner.process.wait(10)
            assert path.exists()
            slab = Slab.create(folder, MIB, "next")
            assert not path.exists()
            slab.close()
    assert list(folder.iterdir()) == []
    assert free_bytes(folder) == pytest.approx(before, abs=MIB)


def test_a_stopped_owner_is_alive(folder: Path) -> None:
    with child("own", folder, MIB) as owner:
        path = Path(owner.hear())
        owner.process.send_signal(signal.SIGSTOP)
        assert sweep(folder) == []
        owner.process.send_signal(signal.SIGCONT)
        owner.say("")
        assert owner.end() == ""
        assert not path.exists()


def test_files_of_other_programs_are_left_alone(folder: Path) -> None:
    (folder / "psm_1234").write_bytes(b"x")
    (folder / "notes.slab").write_bytes(b"x")
    assert sweep(folder) == []


def test_a_creation_that_was_swept_away_begins_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock
    calls: list[int] = []

    def swept_first(fd: int, how: int) -> None:
        if not calls:
            next(folder.glob("h3slab-*")).unlink()
        calls.append(fd)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    made = create_slab_file(folder, MIB, "test")
    assert made.path.exists()
    assert len(calls) == 2
    os.close(made.fd)


@root_only
def test_too_little_room_says_needed_and_found(small: Path) -> None:  # case 50
    with pytest.raises(DeployError, match=r"needed 64 MiB, found 8 MiB free.*shm_size.*service.slab_bytes"):
        Slab.create(small, 64 * MIB, "test")
    assert list(small.iterdir()) == []


@root_only
def test_too_little_room_is_found_before_any_is_taken(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling the file system to its brim, if only to find that out, would hurt whoever else uses it."""
    taken: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, size: taken.append(size))
    with pytest.raises(DeployError):
        Slab.create(small, 64 * MIB, "test")
    assert taken == []


@root_only
def test_room_that_goes_while_allocating_is_an_error_not_a_crash(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared_runtime.transport.files._check_room", lambda *_: None)
    with pytest.raises(DeployError, match=r"needed 64 MiB"):  # case 50: posix_fallocate finds it
        Slab.create(small, 64 * MIB, "test")
    assert list(small.iterdir()) == []
    slab = Slab.create(small, 4 * MIB, "test")
    slab.close()


@root_only
def test_a_full_file_system_cannot_hurt_a_slab_that_stands(small: Path) -> None:  # case 50
    slab = Slab.create(small, 4 * MIB, "test")
    with (small / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        os.posix_fallocate(filler.fileno(), 0, 5 * MIB)
    (small / "filler").write_bytes(bytes(free_bytes(small)))
    landing = slab.reserve(3 * MIB, "1" * 32, 5.0, 0.0)
    slab.view(landing)[:] = b"\xaa" * (3 * MIB)
    slab.close()


@root_only
def test_a_read_only_folder_says_so(small: Path) -> None:  # case 50
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    with pytest.raises(DeployError, match=r"read-only file system.*service.slab_folder"):
        Slab.create(small, MIB, "test")


@root_only
def test_a_folder_of_another_user_says_so(folder: Path) -> None:  # case 48
    folder.chmod(0o755)
    with child("own", folder, MIB, NOBODY) as owner:
        assert owner.hear().startswith(f"DeployError slab folder {folder} is not writable for user {NOBODY}")


@root_only
def test_a_slab_of_another_user_is_a_clear_error_and_no_hang(folder: Path) -> None:  # case 48
    folder.chmod(0o777)
    foreign = folder / "h3slab-diffusion-1-0000000000000000.slab"
    foreign.touch(mode=0o600)
    with child("own", folder, MIB, NOBODY) as owner:
        said = owner.hear()
    assert said.startswith(f"DeployError slab {foreign} cannot be opened by user {NOBODY}")
    assert "service.slab_folder" in said
    assert foreign.exists()


def test_a_folder_that_is_a_file_says_so(folder: Path) -> None:
    (folder / "file").touch()
    with pytest.raises(DeployError, match=r"service.slab_folder"):
        Slab.create(folder / "file", MIB, "test")
    with pytest.raises(DeployError, match=r"service.slab_folder"):
        Slab.create(folder / "file" / "below", MIB, "test")


def test_an_owner_is_a_plain_name(folder: Path) -> None:
    with pytest.raises(DeployError, match="owner"):
        Slab.create(folder, MIB, "../other")


def test_only_slabs_inside_the_folder_are_opened(folder: Path, slab: Slab) -> None:
    slabs = SlabFolder(folder)
    link, pipe, empty = (folder / f"h3slab-{name}.slab" for name in ("link", "pipe", "empty"))
    link.symlink_to(slab.path)
    os.mkfifo(pipe)
    empty.touch()
    for path in (
        link,
        pipe,
        empty,
        folder / "h3slab-hard.slab" / ".." / slab.path.name,
        folder / "notes.txt",
        Path("/etc/passwd"),
        Path("/dev/shm") / slab.path.name,
    ):
        with pytest.raises(TransportError):
            slabs.open(str(path))
    assert slabs.open(str(slab.path)).size == slab.size
    slabs.close()


def test_a_slab_of_another_folder_is_not_opened(folder: Path, slab: Slab) -> None:
    (folder / "ours").mkdir()
    with pytest.raises(TransportError, match="one slab folder"):
        SlabFolder(folder / "ours").open(str(slab.path))


def test_a_slab_that_is_elsewhere_says_that_shared_memory_needs_one_host(folder: Path) -> None:
    with pytest.raises(TransportError, match=r"one host.*NixlConnector"):
        SlabFolder(folder).open(str(folder / "h3slab-gone.slab"))


def test_the_memory_of_a_removed_slab_is_let_go(folder: Path) -> None:  # case 46
    before = free_bytes(folder)
    slab = Slab.create(folder, 16 * MIB, "test")
    slabs = SlabFolder(folder)
    slabs.open(str(slab.path))
    slab.close()
    assert free_bytes(folder) <= before - 15 * MIB
    slabs.forget_removed()
    assert free_bytes(folder) == pytest.approx(before, abs=MIB)
    with pytest.raises(TransportError):
        slabs.open(str(slab.path))
