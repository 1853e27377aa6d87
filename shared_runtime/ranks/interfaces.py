"""By which network interface this host talks to another one. Runs in ranks."""

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9
_IPV6_TABLE = Path("/proc/net/if_inet6")


def interface_towards(host: str) -> str:
    """The interface that has the address from which `host` is reached; `host` may be this one.

    Raises:
        OSError: there is no way to `host`, or no interface has that address.
    """
    family, _, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # chooses a route and sends nothing
        own = probe.getsockname()[0]
    for name, address in _ipv6_addresses() if family == socket.AF_INET6 else _ipv4_addresses():
        if address == own:
            return name
    raise OSError(f"no interface has the address {own}, from which {host} is reached")


def _ipv4_addresses() -> list[tuple[str, str]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # without an address
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _ipv6_addresses() -> list[tuple[str, str]]:
    rows = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows]
