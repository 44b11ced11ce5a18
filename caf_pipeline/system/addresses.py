"""Which internet addresses are the public network's, and which this machine's, its network's or
nobody's.

A host that a stranger names may stand at any address; what listens on this machine or beside it
trusts who reaches it. Source: IANA's IPv4 and IPv6 Special-Purpose Address Registries; RFC 6890,
6052 (NAT64), 3056 (6to4).
"""

import ipaddress
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final

# Written out, since what the standard library calls global differs between the Python versions that
# we run on.
_NOT_PUBLIC_4: Final = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host; 0.0.0.0 itself reaches loopback
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a carrier's NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local; clouds tell a machine its credentials here
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
"""All that is allocated of global unicast: loopback, link-local, unique-local, multicast and
unspecified lie outside.
"""

_NOT_PUBLIC_6: Final = tuple(
    IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20")
)
_NAT64: Final = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether a numeric address is one of the public network.

    IPv6 addresses that stand for an IPv4 one (mapped, NAT64, 6to4) are judged by that one. What is
    no plain numeric address, one with a zone (`fe80::1%eth0`) included, is not public.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv4Address):
        return _is_public_4(parsed)
    if parsed.scope_id is not None:
        return False
    meant = (
        parsed.ipv4_mapped
        or parsed.sixtofour
        or (IPv4Address(int(parsed) & 0xFFFF_FFFF) if parsed in _NAT64 else None)
    )
    return _is_public_4(meant) if meant else _is_public_6(parsed)


def _is_public_4(address: IPv4Address) -> bool:
    return not any(address in network for network in _NOT_PUBLIC_4)


def _is_public_6(address: IPv6Address) -> bool:
    return address in _GLOBAL_6 and not any(address in network for network in _NOT_PUBLIC_6)
