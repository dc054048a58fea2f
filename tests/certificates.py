"""Certificates for masters of tests and benchmarks: ECDSA, as in the cluster."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dlrover_py.protocol import names


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of a private certificate authority and of a master's certificate that it signed."""

    authority: Path
    cert: Path
    key: Path


def issue(folder: Path, name: str = names.MASTER_NAME) -> Certificates:
    """Make a certificate authority and a certificate for a name, as files in a folder."""
    ours, its = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test's authority")])
    now = datetime.now(UTC)

    def begun(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )

    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    root = (
        begun(authority, ours)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ours.public_key()), critical=False)
        .sign(ours, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    leaf = (
        begun(subject, its)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ours.public_key()), critical=False
        )
        .sign(ours, hashes.SHA256())
    )
    made = Certificates(folder / "ca.pem", folder / "tls.pem", folder / "tls.key")
    made.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    made.cert.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    made.key.touch(mode=0o600)
    made.key.write_bytes(
        its.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made
