"""Tells which addresses of the network a gateway may fetch from for a client: public ones only."""

from ipaddress import IPv4Address, IPv6Network, ip_address

# IPv4-only hosts have such addresses in networks with IPv6 only; the last bits are theirs.
_NAT64 = IPv6Network("64:ff9b::/96")
# Other forms of IPv4 addresses, ends of tunnels, and addresses of one site.
_NEVER = tuple(
    map(
        IPv6Network,
        ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10"),
    )
)


def is_public(address: str) -> bool:
    """Whether an address, or the IPv4 address that it is a form of, is public."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if not isinstance(found, IPv4Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found in _NAT64:
            found = IPv4Address(int(found) & 0xFFFF_FFFF)
        elif any(found in network for network in _NEVER):
            return False
    return found.is_global and not found.is_multicast
