"""Where workers that register themselves may be: a gateway sends prompts there, and must not be talked into asking anything else.

An address has to lie in one of the networks that the configuration allows, or a name in one of its domains. Names are resolved here,
once, and plain http goes to the address that was checked, so that a name cannot mean something else a moment later. With https the
name stays, as the certificate has to fit it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

RESOLVE_S = 2.0

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DOMAIN = re.compile(r"^\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*$", re.IGNORECASE)
# what clouds serve credentials and settings at, beside 169.254.169.254 (link-local)
_METADATA = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)  # fmt: skip
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class NotAllowed(Exception):
    """Why a URL is not used."""


class AllowedURLs:
    """The networks and domains of `registry.allow`. Raises ValueError for what is neither."""

    def __init__(self, allow: Iterable[str]) -> None:
        self._networks: list[_Network] = []
        self._domains: list[str] = []
        for item in allow:
            try:
                self._networks.append(ipaddress.ip_network(item))
            except ValueError as error:
                if "/" in item or ":" in item or re.fullmatch(r"[0-9.]+", item):
                    raise ValueError(f"{item!r} is no network: {error}") from None
                if not _DOMAIN.match(item):
                    raise ValueError(f"{item!r} is neither a network (10.0.0.0/8) nor a host or domain (.gpu.internal)") from None
                self._domains.append("." + item.lower().lstrip("."))

    async def place(self, url: str) -> str:
        """The URL to use. Raises NotAllowed, and OSError where the name cannot be resolved now."""
        parts = urlsplit(url)
        host = parts.hostname or ""
        try:
            port = parts.port
        except ValueError:
            raise NotAllowed("its URL has no valid port") from None
        try:
            self._check(ipaddress.ip_address(host), in_domain=False)
        except ValueError:
            pass
        else:
            return url
        in_domain = self._in_domain(host.lower().rstrip("."))
        if not in_domain and not self._networks:
            raise NotAllowed(f"its host {host} is not within registry.allow")
        try:
            async with asyncio.timeout(RESOLVE_S):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise OSError(f"its host {host} was not resolved within {RESOLVE_S:g} s") from None
        except UnicodeError:
            raise NotAllowed(f"its host {host} is no name") from None
        addresses = [ipaddress.ip_address(str(place[0])) for *_, place in found]
        if not addresses:
            raise OSError(f"its host {host} has no address")
        for address in addresses:
            self._check(address, in_domain)
        if parts.scheme == "https":
            return url
        literal = f"[{addresses[0]}]" if addresses[0].version == 6 else str(addresses[0])
        return parts._replace(netloc=literal if port is None else f"{literal}:{port}").geturl()

    def _in_domain(self, host: str) -> bool:
        return any(f".{host}".endswith(domain) for domain in self._domains)

    def _check(self, address: _Address, in_domain: bool) -> None:
        for seen in (address, _embedded(address)):
            if seen is None:
                continue
            if seen.is_link_local or seen in _METADATA:
                raise NotAllowed(f"its address {address} is link-local or a cloud's metadata service, which is never allowed")
            if seen.is_unspecified or seen.is_multicast or seen == ipaddress.ip_address("255.255.255.255"):
                raise NotAllowed(f"its address {address} is not that of a host")
        plain = _embedded(address) or address
        if any(plain in network for network in self._networks if network.version == plain.version):
            return
        # a name in an allowed domain may be anywhere but on this machine
        if not in_domain or plain.is_loopback:
            raise NotAllowed(f"its address {address} is not within registry.allow")


def _embedded(address: _Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
