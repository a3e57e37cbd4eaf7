"""An authority and certificates for the tests."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Files:
    """PEM files: a certificate and its key."""

    cert: str
    key: str


def rsa_pair(directory: Path) -> Files:
    """A public key, in place of the certificate, and its private key: what signs etcd's JWTs."""
    pair = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    files = Files(str(directory / "jwt.pub"), str(directory / "jwt.key"))
    public = pair.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    Path(files.cert).write_bytes(public)
    _write_key(pair, files.key)
    return files


def _write_key(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, path: str) -> None:
    Path(path).write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


class Authority:
    """Signs certificates; `cacert` is the file to trust."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        path = directory / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.cacert = str(path)

    def issue(
        self,
        name: str,
        address: str = "127.0.0.1",
        days: tuple[int, int] = (-1, 1),
        host: str = "localhost",
    ) -> Files:
        """A certificate for the common name, the host and the IP address, for servers and clients.

        `days`: from when to when it is valid, from now on.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName(host)]
        builder = (
            self._builder(subject, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        files = Files(str(self._directory / f"{name}.crt"), str(self._directory / f"{name}.key"))
        Path(files.cert).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(key, files.key)
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[int, int] = (-1, 1)
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        begin, end = (now + dt.timedelta(days=number) for number in days)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
        )


def shows(files: Files) -> tuple[str, ...]:
    return f"--cert-file={files.cert}", f"--key-file={files.key}"


def asking(authority: Authority) -> tuple[str, ...]:
    return "--client-cert-auth", f"--trusted-ca-file={authority.cacert}"


def showing(authority: Authority, files: Files) -> tuple[str, ...]:
    """By which a client shows these files."""
    return f"--cacert={authority.cacert}", f"--cert={files.cert}", f"--key={files.key}"
