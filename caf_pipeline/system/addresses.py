"""Which IP addresses are public.

A stranger's host name may resolve to any address, and local servers often trust their clients.
Source: IANA's IPv4 and IPv6 Special-Purpose Address Registries; RFC 6890, 6052 (NAT64), 3056
(6to4).
"""

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

# The standard library's definition of global addresses differs between Python versions.
_NOT_PUBLIC_4: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host; 0.0.0.0 itself reaches loopback
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local; clouds serve a machine's credentials here
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and the broadcast address
    )
)
_GLOBAL_6: Final = IPv6Network("2000::/3")
"""All allocated global unicast; nothing local or multicast."""

_NOT_PUBLIC_6: Final = tuple(
    IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20")
)
_NAT64: Final = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Return whether a numeric address is public.

    An IPv6 address that represents an IPv4 address (mapped, NAT64, 6to4) is judged by the latter.
    Host names and addresses with a zone (`fe80::1%eth0`) are not public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        return _is_public_4(parsed)
    if parsed.scope_id is not None:
        return False
    embedded = (
        parsed.ipv4_mapped
        or parsed.sixtofour
        or (IPv4Address(int(parsed) & 0xFFFF_FFFF) if parsed in _NAT64 else None)
    )
    return _is_public_4(embedded) if embedded else _is_public_6(parsed)


def _is_public_4(address: IPv4Address) -> bool:
    return not any(address in network for network in _NOT_PUBLIC_4)


def _is_public_6(address: IPv6Address) -> bool:
    return address in _GLOBAL_6 and not any(address in network for network in _NOT_PUBLIC_6)
