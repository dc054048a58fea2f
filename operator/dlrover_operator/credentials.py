"""A job's token, and its master's certificate by an authority whose key nobody keeps."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlrover_operator.manifests import Credentials
from dlrover_py.protocol import names

LASTS = timedelta(days=3650)
"""Longer than any job: it is not renewed, since agents hold the authority for their whole life."""
SKEW = timedelta(hours=1)


def issue(wall: float) -> Credentials:
    """Make a certificate (ECDSA P-256).

    Args:
        wall: Unix seconds as the API server has them: this machine's clock may be another.
    """
    now = datetime.fromtimestamp(wall, UTC)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _name("dlrover job")
    root = (
        _begun(authority, authority, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(_id_of(authority_key), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    leaf = (
        _begun(_name(names.MASTER_NAME), authority, key, now)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(names.MASTER_NAME)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(by, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Credentials(
        ca=root.public_bytes(serialization.Encoding.PEM),
        cert=leaf.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def token(key: bytes) -> bytes:
    """What a job's nodes and its master know each other by.

    It follows from the certificate's key, which only the master has: a Secret that somebody has
    deleted is made again as it was, for nodes that run hold what it said for their whole life.
    """
    return base64.urlsafe_b64encode(hmac.digest(key, b"dlrover job token", hashlib.sha256)).rstrip(
        b"="
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + LASTS)
    )


def _id_of(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def decoded(secret: dict[str, Any], key: str) -> bytes:
    """What a Secret says under a key."""
    return base64.b64decode((secret.get("data") or {}).get(key, ""))
