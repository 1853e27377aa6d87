"""HTTP that leaves this service: to listed hosts alone, at addresses that were checked. Runs in the API process.

A name is resolved once a hop and the connection goes to the address that was checked, so that a name server which
answers differently a moment later changes nothing. No proxy, no connection that is used twice.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import httpx

from shared_schema.deploy.service import AllowedHost
from shared_schema.errors import OutboundFailed, OutboundRefused

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From host and port to addresses, best first; raises OSError."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REDIRECTS = 3
"""Hops after the first."""
_MOVED = (301, 302, 303, 307, 308)
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Between a provider and its customers: neither public nor private by the registry's words."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PIECE = 256 * 1024


def check_url(url: str, hosts: Sequence[AllowedHost]) -> None:
    """Refuse a URL that this service never dials, as far as the URL tells.

    Raises:
        OutboundRefused: not http or https, with a user name, or to a host that is not listed.
    """
    _listed(_parsed(url), hosts)


def may_connect(address: str, *, private: bool) -> bool:
    """Whether a listed host may have this address: a public one, or with `private` one of an inner network.

    Link-local addresses, where clouds keep their credentials, are never dialled.
    """
    try:
        seen = _inner(ipaddress.ip_address(address))
    except ValueError:
        return False
    if seen.is_link_local or seen.is_multicast or seen.is_unspecified:
        return False
    return seen.is_global or (private and (seen.is_private or seen in _SHARED))


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


async def resolve_name(host: str, port: int) -> list[str]:
    """What the system says."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class PinnedClient:
    """Dials the hosts of one list. `resolve` and `trust` (whom TLS believes) are the system's unless a test says."""

    def __init__(
        self, hosts: Sequence[AllowedHost], resolve: Resolve = resolve_name, trust: ssl.SSLContext | None = None
    ) -> None:
        self._hosts = hosts
        self._resolve = resolve
        # Without kept connections none that was checked for one name can serve another.
        limits = httpx.Limits(max_keepalive_connections=0)
        verify = True if trust is None else trust
        agent = {"user-agent": "minimax-h3"}
        self._http = httpx.AsyncClient(headers=agent, trust_env=False, limits=limits, verify=verify)

    async def close(self) -> None:
        """Nothing is dialled any more."""
        await self._http.aclose()

    async def download(self, url: str, write: Callable[[bytes], object], *, timeout_s: float) -> None:
        """GET with at most three redirects, each hop checked; `write` gets the body piece by piece, in a worker thread.

        Raises:
            OutboundRefused: this hop, or the one it points at, is not allowed.
            OutboundFailed: network, status other than 200, or not whole within `timeout_s`, all hops together.
            Whatever `write` raises.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(REDIRECTS + 1):
                    async with self._open("GET", url, {"accept-encoding": "identity"}, None) as response:
                        if response.status_code not in _MOVED:
                            await _save(response, write)
                            return
                        url = _next(response, url)
        except TimeoutError as error:
            raise OutboundFailed(f"{_host(url)} took more than {timeout_s:g} s") from error
        raise OutboundFailed(f"more than {REDIRECTS} redirects")

    async def post(self, url: str, content: bytes, headers: Mapping[str, str], *, timeout_s: float) -> int:
        """POST in one hop; the status of the answer, whose body is not read.

        Raises:
            OutboundRefused: the hop is not allowed.
            OutboundFailed: network, or no answer within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s), self._open("POST", url, headers, content) as response:
                return response.status_code
        except TimeoutError as error:
            raise OutboundFailed(f"{_host(url)} took more than {timeout_s:g} s") from error

    @asynccontextmanager
    async def _open(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes | None
    ) -> AsyncIterator[httpx.Response]:
        """One hop: resolved, checked, and connected to the address that was checked."""
        parsed = _parsed(url)
        addresses = await self._addresses(parsed)
        try:
            response = await self._connect(method, parsed, addresses, headers, content)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise OutboundFailed(f"{parsed.host}: {type(error).__name__}") from error

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        listed = _listed(url, self._hosts)
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            addresses = await self._resolve(url.raw_host.decode("ascii"), port)
        except (OSError, UnicodeError) as error:
            raise OutboundFailed(f"{url.host} has no address") from error
        # One wrong answer among several spoils all: which one is dialled must not be the name server's choice.
        if not addresses or not all(may_connect(address, private=listed.private) for address in addresses):
            raise OutboundRefused(f"{url.host} has an address that this server does not dial")
        return addresses

    async def _connect(
        self, method: str, url: httpx.URL, addresses: Sequence[str], headers: Mapping[str, str], content: bytes | None
    ) -> httpx.Response:
        for number, address in enumerate(addresses, 1):
            request = self._http.build_request(
                method,
                url.copy_with(host=address),
                headers={**headers, "host": url.netloc.decode("ascii")},
                content=content,
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
                timeout=None,
            )
            try:
                return await self._http.send(request, stream=True)
            except httpx.ConnectError:
                if number == len(addresses):
                    raise
        raise OutboundFailed(f"{url.host} has no address")


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
        # A name in punycode that stands for no name is found only when it is read.
        named = bool(parsed.host)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise OutboundRefused("this is no URL") from error
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise OutboundRefused("a URL has a port from 1 to 65535, or none")
    if parsed.scheme not in ("http", "https") or not named:
        raise OutboundRefused("a URL begins with http:// or https:// and a host")
    if parsed.userinfo:
        raise OutboundRefused("a URL carries no user name and no password")
    return parsed


def _listed(url: httpx.URL, hosts: Sequence[AllowedHost]) -> AllowedHost:
    name = url.raw_host.decode("ascii").lower().rstrip(".")
    for host in hosts:
        if host.covers(name):
            return host
    raise OutboundRefused(f"{url.host[:200]} is no host that this server dials")


def _next(response: httpx.Response, url: str) -> str:
    try:
        # The request went to an address; where it points is seen from the name.
        return str(httpx.URL(url).join(response.headers.get("location", "")))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise OutboundRefused("a redirect to what is no URL") from error


async def _save(response: httpx.Response, write: Callable[[bytes], object]) -> None:
    host = response.request.headers["host"]
    if response.status_code != 200:
        raise OutboundFailed(f"{host} answered {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise OutboundFailed(f"{host} answered with a compressed body")
    async for piece in response.aiter_raw(_PIECE):
        await asyncio.to_thread(write, piece)


def _host(url: str) -> str:
    return httpx.URL(url).host
