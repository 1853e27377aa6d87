"""What leaves the service goes to listed hosts, at the address that was checked, and nowhere else."""

import asyncio
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from diffusion_service.outbound import PinnedClient, check_url, may_connect
from shared_schema.deploy.service import AllowedHost
from shared_schema.errors import OutboundFailed, OutboundRefused
from tests.diffusion_service.listening import Listening, listening, moved, ok

STORE = AllowedHost(host="store.test", private=True)
PUBLIC = AllowedHost(host="media.test")


class Names:
    """A name server; it counts what it was asked, and may answer differently each time."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked = 0
        self._answers = answers

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        return self._answers[min(self.asked, len(self._answers)) - 1]


LOOPBACK = ("127.0.0.1",)


def dial(
    body: Callable[[PinnedClient, Listening, Names], Awaitable[None]],
    names: Names | None = None,
    hosts: Sequence[AllowedHost] = (STORE, PUBLIC),
) -> None:
    async def run() -> None:
        found = names or Names(LOOPBACK)
        client = PinnedClient(hosts, found)
        async with listening() as server:
            try:
                await body(client, server, found)
            finally:
                await client.close()

    asyncio.run(run())


async def fetched(client: PinnedClient, url: str, timeout_s: float = 30) -> bytes:
    pieces: list[bytes] = []
    await client.download(url, pieces.append, timeout_s=timeout_s)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.9",
        "100.64.1.1",
        "::1",
        "fd12::1",
        "::ffff:10.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:0a00:0001::1",
    ],
)
def test_an_inner_address_is_for_hosts_that_are_listed_as_private(address: str) -> None:
    assert not may_connect(address, private=False)
    assert may_connect(address, private=True)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "fe80::1",
        "fe80::1%eth0",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "::ffff:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "no address",
    ],
)
def test_link_local_and_the_like_are_for_nobody(address: str) -> None:
    assert not may_connect(address, private=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_for_everyone(address: str) -> None:
    assert may_connect(address, private=False)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://media.test/a",
        "file:///etc/passwd",
        "http:///a",
        "http://u:p@media.test/",
        "http://other.test/",
        "media",
        "http://media.test.other.test/",
        "http://2130706433/",
        "http://[::1]/",
        "http://media.test:x/",
        "http://media.test:99999/",
        "http://media.test:0/",
        "http://media.test:-1/",
        "http://xn--a.cdn.test/",
        "//media.test/",
    ],
)
def test_a_url_that_is_not_dialled_is_told_by_its_text(url: str) -> None:
    with pytest.raises(OutboundRefused):
        check_url(url, (PUBLIC, STORE, AllowedHost(host="*.cdn.test")))


@pytest.mark.parametrize("url", ["https://media.test/a", "http://MEDIA.test.:81/", "https://a.b.cdn.test/x?y"])
def test_a_listed_host_is_dialled(url: str) -> None:
    check_url(url, (PUBLIC, AllowedHost(host="*.cdn.test")))


def test_the_request_goes_to_the_checked_address_under_the_hosts_name() -> None:
    async def body(client: PinnedClient, server: Listening, names: Names) -> None:
        server.answers["/a.png?b=c"] = ok(b"picture")
        assert await fetched(client, f"http://store.test:{server.port}/a.png?b=c") == b"picture"
        head = server.requests[0].decode()
        assert head.startswith("GET /a.png?b=c HTTP/1.1\r\n")
        assert f"host: store.test:{server.port}\r\n" in head
        assert names.asked == 1

    dial(body)


@pytest.mark.parametrize("addresses", [LOOPBACK, ("8.8.8.8", "127.0.0.1"), ("169.254.169.254",), ("::ffff:127.0.0.1",)])
def test_a_public_hosts_inner_address_sees_no_connection(addresses: Sequence[str]) -> None:  # case 25
    async def body(client: PinnedClient, server: Listening, _names: Names) -> None:
        with pytest.raises(OutboundRefused):
            await fetched(client, f"http://media.test:{server.port}/")
        assert server.connections == 0

    dial(body, Names(addresses))


def test_a_name_that_changes_after_the_check_changes_nothing() -> None:  # case 25
    async def body(client: PinnedClient, server: Listening, names: Names) -> None:
        with pytest.raises(OutboundFailed):
            await fetched(client, f"http://media.test:{server.port}/", timeout_s=0.3)
        assert (server.connections, names.asked) == (0, 1)

    dial(body, Names(("203.0.113.1",), LOOPBACK), (AllowedHost(host="media.test", private=True),))


def test_every_hop_is_checked() -> None:  # case 25
    async def body(client: PinnedClient, server: Listening, names: Names) -> None:
        for place in (f"http://media.test:{server.port}/", "http://169.254.169.254/", "file:///etc/passwd"):
            server.answers["/go"] = moved(place)
            before = server.connections
            with pytest.raises(OutboundRefused):
                await fetched(client, f"http://store.test:{server.port}/go")
            assert server.connections == before + 1

    dial(body)


def test_three_redirects_are_followed_and_no_fourth() -> None:
    async def body(client: PinnedClient, server: Listening, names: Names) -> None:
        server.answers |= {f"/{n}": moved(f"/{n + 1}", status) for n, status in enumerate((301, 302, 307, 308))}
        server.answers["/4"] = ok(b"there")
        assert await fetched(client, f"http://store.test:{server.port}/1") == b"there"
        with pytest.raises(OutboundFailed, match="3 redirects"):
            await fetched(client, f"http://store.test:{server.port}/0")
        assert (server.connections, names.asked) == (8, 8)

    dial(body)


@pytest.mark.parametrize("path", ["/slow", "/silent"])
def test_a_host_that_takes_too_long_is_left(path: str) -> None:  # case 25
    async def body(client: PinnedClient, server: Listening, _names: Names) -> None:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(OutboundFailed, match=r"more than 0\.3 s"):
            await fetched(client, f"http://store.test:{server.port}{path}", timeout_s=0.3)
        assert asyncio.get_running_loop().time() - begun < 15

    dial(body)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
        ok(b"x", "Content-Encoding: gzip"),
        b"nonsense\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
    ],
)
def test_an_answer_that_is_no_file_is_an_error(answer: bytes) -> None:
    async def body(client: PinnedClient, server: Listening, _names: Names) -> None:
        server.answers["/"] = answer
        with pytest.raises(OutboundFailed):
            await fetched(client, f"http://store.test:{server.port}/")

    dial(body)


def test_what_the_writer_raises_ends_the_download() -> None:
    async def body(client: PinnedClient, server: Listening, _names: Names) -> None:
        server.answers["/"] = ok(bytes(10_000_000))

        def full(piece: bytes) -> None:
            raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            await client.download(f"http://store.test:{server.port}/", full, timeout_s=30)

    dial(body)


def test_a_name_without_an_address_is_an_error() -> None:
    async def body(client: PinnedClient, _server: Listening, _names: Names) -> None:
        with pytest.raises(OutboundFailed, match="no address"):
            await fetched(client, "http://store.test/")

    async def nobody(_host: str, _port: int) -> Sequence[str]:
        raise OSError("no such name")

    async def run() -> None:
        client = PinnedClient([STORE], nobody)
        await body(client, Listening(), Names(LOOPBACK))
        await client.close()

    asyncio.run(run())


def test_post_tells_the_status() -> None:
    async def body(client: PinnedClient, server: Listening, _names: Names) -> None:
        server.answers["/hook"] = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        url = f"http://store.test:{server.port}/hook"
        assert await client.post(url, b"{}", {"content-type": "application/json"}, timeout_s=30) == 202
        server.answers["/hook"] = moved("http://store.test/elsewhere")
        assert await client.post(url, b"{}", {}, timeout_s=30) == 302
        assert server.connections == 2

    dial(body)


def test_tls_is_proved_against_the_name_and_not_the_address(tmp_path: Path) -> None:
    def certificate(name: str) -> tuple[Path, Path]:
        key, file = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
        command += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(file)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        return key, file

    async def run() -> None:
        for name in ("store.test", "other.test"):
            key, file = certificate(name)
            server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server_side.load_cert_chain(file, key)
            client = PinnedClient([STORE], Names(LOOPBACK), ssl.create_default_context(cafile=str(file)))
            async with listening(server_side) as server:
                server.answers["/"] = ok(b"secret")
                url = f"https://store.test:{server.port}/"
                if name == "store.test":
                    assert await fetched(client, url) == b"secret"
                else:
                    with pytest.raises(OutboundFailed):
                        await fetched(client, url)
            await client.close()

    asyncio.run(run())
