"""TLS for servers of tests, by a certificate that nobody knows.

certificate    a file with a certificate of this machine, signed by itself; its key is in `key.pem`
beside it tls            a server's context with it
"""

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost and 127.0.0.1, beside its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder(
        name,
        name,
        key.public_key(),
        x509.random_serial_number(),
        now - timedelta(days=1),
        now + timedelta(days=1),
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    )
    signed = made.add_extension(names, critical=False).sign(key, hashes.SHA256())
    path = tmp_path / "certificate.pem"
    path.write_bytes(signed.public_bytes(Encoding.PEM))
    path.with_name("key.pem").write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """The context of a server that has it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context
