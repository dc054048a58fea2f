"""A job's token and its master's certificate.

The key of the authority that signs the certificate is discarded.
"""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlrover_operator.manifests import MasterCredentials
from dlrover_py.protocol import names

LASTS = timedelta(days=3650)
"""Validity of certificates, longer than any job.

A certificate is never renewed, because an agent keeps the authority that it got at its start.
"""
SKEW = timedelta(hours=1)
"""Tolerated difference between clocks: a certificate is valid from this time before its issue."""


def issue(wall: float) -> MasterCredentials:
    """Make an authority and a certificate of the master (ECDSA P-256). Nothing is stored.

    They are valid from one hour before ``wall``, for ten years. The key of the authority is
    discarded.

    Args:
        wall: time in Unix seconds by the API server's clock, from which this machine's may differ.
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
    return MasterCredentials(
        ca=root.public_bytes(serialization.Encoding.PEM),
        cert=leaf.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def token(key: bytes) -> bytes:
    """Return the token by which a job's nodes and its master authenticate each other.

    It is derived from the private key of the certificate, which only the master has. A deleted
    Secret of the token can therefore be restored with the same token, which running nodes keep for
    their whole life.

    Args:
        key: private key of the master's certificate in PEM.
    """
    return base64.urlsafe_b64encode(hmac.digest(key, b"dlrover job token", hashlib.sha256)).rstrip(
        b"="
    )


def _name(common: str) -> x509.Name:
    """Return an X.509 name with this common name."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime
) -> x509.CertificateBuilder:
    """Return an unsigned certificate builder with the fields that both certificates have."""
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
    """Return the subject key identifier of a key."""
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Return the key usage of an authority, which signs, or of a server."""
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
    """Return the decoded value of a key of a Secret; empty if the key is missing."""
    return base64.b64decode((secret.get("data") or {}).get(key, ""))
