"""Who may take part: a certificate authority (CA), the server's certificate, and a key pair for every site."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from oneround.errors import DataError
from oneround.federate.sites import NAME
from oneround.files import OWNER_ONLY, write_durably

CURVE = ec.SECP384R1()
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class KeyFolder:
    """A folder of keys. The server needs `ca.crt`, `server.crt`, `server.key` and `sites/*.pub`; a site `ca.crt` and its own key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ca, self.ca_key = path / "ca.crt", path / "ca.key"
        self.certificate, self.key = path / "server.crt", path / "server.key"

    def public(self, site: str) -> Path:
        return self.path / "sites" / f"{site}.pub"

    def private(self, site: str) -> Path:
        return self.path / "sites" / f"{site}.key"

    @property
    def sites(self) -> list[str]:
        return sorted(file.stem for file in (self.path / "sites").glob("*.pub"))

    def make(self, hosts: Sequence[str], sites: Sequence[str], days: float = 825) -> list[Path]:
        """Make what is missing: a CA and a certificate for these hosts, and a key pair for every site named. Returns the new files.

        Existing files stay as they are. A site that makes its own pair need not show its private key to anybody.
        """
        for site in sites:
            if not re.fullmatch(NAME, site):
                raise DataError(f"--site {site}: a site's name is letters, digits, _ . and -, at most 64")
        for host in hosts:
            if not isinstance(_alternative(host), x509.IPAddress) and not HOST.fullmatch(host):
                raise DataError(
                    f"--host {host!r}: no name or address of a machine; give the one by which sites reach the server"
                )
        (self.path / "sites").mkdir(parents=True, exist_ok=True)
        if hosts and self.certificate.exists():
            if not self.ca.exists():
                raise DataError(
                    f"{self.certificate}: exists, but its {self.ca.name} is missing; remove it too, then both are made again"
                )
            self._check_hosts(hosts)
        written: list[Path] = []
        if hosts and not self.ca.exists():
            written += self._make_ca(days)
        if hosts and not self.certificate.exists():
            written += self._make_certificate(hosts, days)
        for site in sites:
            if not self.public(site).exists():
                written += self._make_pair(site)
        return written

    def _check_hosts(self, hosts: Sequence[str]) -> None:
        """Refuse hosts that the existing certificate is not for."""
        certificate = _read_certificate(self.certificate)
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        other = next((host for host in hosts if _alternative(host) not in list(alternatives)), None)
        if other is not None:
            raise DataError(
                f"--host {other}: {self.certificate} is for {', '.join(str(name.value) for name in alternatives)}; "
                f"remove it, or make keys in another folder"
            )

    def _make_ca(self, days: float) -> list[Path]:
        key, name = ec.generate_private_key(CURVE), _name("oneround federation")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(name, name, key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA384())
        )
        return _write_certificate(certificate, self.ca, key, self.ca_key)

    def _make_certificate(self, hosts: Sequence[str], days: float) -> list[Path]:
        signer = load_pem_private_key(self.ca_key.read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(CURVE)
        names = [_alternative(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
        certificate = (
            _builder(_name("oneround server"), _read_certificate(self.ca).subject, key, days)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA384())
        )
        return _write_certificate(certificate, self.certificate, key, self.key)

    def _make_pair(self, site: str) -> list[Path]:
        """A key pair in OpenSSH's format, which Flower reads."""
        key = ec.generate_private_key(CURVE)
        private, public = self.private(site), self.public(site)
        raw = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        write_durably(private, raw, mode=OWNER_ONLY)
        public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
        return [private, public]

    def check_server(self) -> None:
        """Refuse a folder that lacks what a server needs, or whose certificates are not valid today."""
        for file in (self.ca, self.certificate, self.key):
            if not file.is_file():
                raise DataError(
                    f"{file}: missing; make it with oneround federate keys {self.path} --host THIS-MACHINE --site NAME"
                )
        remake = f"make new ones with oneround federate keys {self.path} --host NAME"
        all_files = ", ".join(file.name for file in (self.ca, self.ca_key, self.certificate, self.key))
        check_dates(self.ca, f"remove {all_files} and {remake}, and give every site the new {self.ca.name}")
        check_dates(self.certificate, f"remove it and {remake}")
        try:
            _read_certificate(self.certificate).verify_directly_issued_by(_read_certificate(self.ca))
        except (ValueError, TypeError, InvalidSignature):
            raise DataError(
                f"{self.certificate}: not made with {self.ca.name}, sites would refuse it; "
                f"remove {self.certificate.name} and {self.key.name} and {remake}"
            ) from None
        if not self.sites:
            raise DataError(
                f"{self.path}/sites: no site's public key, nobody could take part; add one with oneround federate keys {self.path} --site NAME"
            )


def check_dates(file: Path, fix: str) -> None:
    """Refuse a certificate that is not valid today; the error says when it is, and `fix` what to do."""
    try:
        certificate = _read_certificate(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable certificate ({error})") from None
    now, end, start = datetime.now(UTC), certificate.not_valid_after_utc, certificate.not_valid_before_utc
    if not start <= now <= end:
        state = f"expired on {end:%Y-%m-%d}" if now > end else f"valid only from {start:%Y-%m-%d}"
        raise DataError(f"{file}: {state}; {fix}")


def check_server_at(address: str, ca: Path) -> str:
    """TLS handshake with the server: '' on success, else why it cannot be reached yet; DataError if its certificate is refused."""
    try:
        _shake_hands(address, ssl.create_default_context(cafile=str(ca)))
    except ssl.SSLCertVerificationError as error:
        raise DataError(
            f"{address}: its certificate is refused, {error.verify_message}; ask the server's operator"
        ) from None
    except (ssl.SSLError, ConnectionResetError) as error:
        raise DataError(
            f"{address}: does not speak TLS ({error}); is it a oneround server without --insecure?"
        ) from None
    except (OSError, ValueError) as error:
        return f"{address}: nobody answers yet ({error}); waiting"
    return ""


def speaks_tls(address: str) -> bool:
    """Whether a TLS server answers at this address; its certificate is not checked."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _shake_hands(address, context)
    except (OSError, ValueError):
        return False
    return True


def _shake_hands(address: str, context: ssl.SSLContext) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as plain:
        context.wrap_socket(plain, server_hostname=host).close()


def _read_certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def _write_certificate(
    certificate: x509.Certificate, path: Path, key: ec.EllipticCurvePrivateKey, key_path: Path
) -> list[Path]:
    raw = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_durably(key_path, raw, mode=OWNER_ONLY)
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    return [path, key_path]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    """A certificate that is valid from yesterday, so that clocks may differ."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
