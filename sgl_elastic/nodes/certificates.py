"""Who may use the tunnels of one server: certificates that its front signs, in memory only.

    node:   [NodeKey].public --Ray--> front: [Authority.sign] --certificate, by Ray--> node
            [NodeKey.identity] --> [Identity], the TLS contexts of both ends of a tunnel

A private key never leaves the process that made it, and no file with a name ever holds one. So who
only reads what Ray carries cannot use a tunnel; who can change it, or start actors, can. Every
start of a server has an authority of its own: what another one, or an earlier start, has signed is
worth nothing here.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sgl_elastic.errors import ElasticConfigError

# No server runs so long. The authority ends with its front, and all that it has signed with it.
VALID_FOR = datetime.timedelta(days=3650)
CLOCKS_DIFFER_BY = datetime.timedelta(days=1)  # of two machines, at most

_CURVE = ec.SECP256R1()
_ROLES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


@dataclass(frozen=True)
class Identity:
    """How one process shows itself to gateways, and to those who come to its own."""

    as_client: ssl.SSLContext
    as_gateway: ssl.SSLContext


class Authority:
    """Of one start of a server; lives in the front. `certificate` is its own, as PEM."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(_CURVE)
        self._name = _name("authority")
        public_key = self._key.public_key()
        unsigned = _unsigned(self._name, self._name, public_key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.certificate = self._signed(unsigned.add_extension(_usage("key_cert_sign"), True))

    def sign(self, public_key: str, host: str) -> str:
        """A certificate, as PEM, for who has the key and is found at this address.

        `public_key` is PEM. Raises ElasticConfigError for what is no key of the kind we make.
        """
        unsigned = _unsigned(_name(host), self._name, _public(public_key, host))
        for extension, is_critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage("digital_signature"), True),
            (_ROLES, False),
            (x509.SubjectAlternativeName([_alternative(host)]), False),
        ):
            unsigned = unsigned.add_extension(extension, is_critical)
        return self._signed(unsigned)

    def _signed(self, unsigned: x509.CertificateBuilder) -> str:
        ours = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = unsigned.add_extension(ours, False).sign(self._key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


class NodeKey:
    """A process's own key. `public`, as PEM, is what others may know of it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(_CURVE)
        self.public = (
            self._key.public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            .decode()
        )

    def identity(self, certificate: str, authority: str) -> Identity:
        """With what the authority has signed, and its own certificate, both as PEM.

        Raises ElasticConfigError when they are none, or are for another key.
        """
        private = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        try:
            with _unnamed_file(private + certificate.encode()) as path:
                return Identity(
                    _context(ssl.PROTOCOL_TLS_CLIENT, path, authority),
                    _context(ssl.PROTOCOL_TLS_SERVER, path, authority),
                )
        except (ssl.SSLError, ValueError) as error:
            raise ElasticConfigError(f"no certificate for this node's key: {error}") from error


def own_identity(authority: Authority, host: str) -> Identity:
    """Of the process that has the authority."""
    key = NodeKey()
    return key.identity(authority.sign(key.public, host), authority.certificate)


def _context(protocol: int, path: str, authority: str) -> ssl.SSLContext:
    """TLS 1.3 alone, both ends with a certificate, nothing resumed, no look at the environment."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority)
    context.load_cert_chain(path)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves anew who it is
    return context


@contextmanager
def _unnamed_file(data: bytes) -> Iterator[str]:
    """A path to bytes in memory: OpenSSL reads keys from paths only."""
    with os.fdopen(os.memfd_create("key", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(data)
        yield f"/proc/self/fd/{file.fileno()}"


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER_BY)
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(what: str) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: name == what for name in names})


def _name(of: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"sgl-elastic {of}"[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _public(pem: str, host: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except ValueError as error:
        raise ElasticConfigError(f"{host} sent no public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ElasticConfigError(f"{host} sent a {type(key).__name__}: another version runs there")
    return key
