"""The proof of a master that it knows its job's token, before a client sends the token. Pure.

Any program may have taken the address at which a master is expected. So the client first asks for
a proof on the new connection. The proof also covers the address of the connection: a program at
another address of the same machine cannot get it from the master and pass it on.
"""

import hmac

PATH = "/v1/proof"
"""Path at which a master proves that it knows the token. It is answered without the token."""
NONCE_BYTES = 32
"""Bytes of the random nonce that a client sends, in hexadecimal."""
NONCE_PATTERN = "^[0-9a-f]{32,128}$"
"""Nonces that a master accepts: 16 to 64 bytes in hexadecimal."""
_PREFIX = b"dlrover master proof\0"


def connection_address(host: str, port: int) -> str:
    """Return the part of a connection's address that both of its ends see: host and port.

    The port is the same at both ends. The host is the same only on the loopback device, because a
    Service or a gateway may translate other addresses. For those the host is empty.

    Args:
        host: IP address of the server's end.
        port: Port of the server's end.
    """
    host = host.removeprefix("::ffff:")  # an IPv4 client of a socket for both families
    return f"{host if host == '::1' or host.startswith('127.') else ''}:{port}"


def master_proof(token: str, nonce: str, address: str) -> str:
    """Return the proof in hexadecimal.

    Args:
        token: Token of the job.
        nonce: Random text of the client.
        address: Address of the connection, from :func:`connection_address`.
    """
    message = _PREFIX + f"{nonce}\0{address}".encode()
    return hmac.new(token.encode(), message, "sha256").hexdigest()
