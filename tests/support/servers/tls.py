"""TLS for tests: an authority, and a server's end of TLS before a PostgreSQL."""

import datetime
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_SSL_REQUEST = bytes.fromhex("0000000804d2162f")  # the chapter on message formats: SSLRequest


@dataclass
class Authority:
    """A certificate authority in ``folder``: files ``<name>.crt`` and ``<name>.key``."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"test authority {self.folder.name}")]
        )
        authority = x509.BasicConstraints(ca=True, path_length=None)
        self._write("root", self._signed(self._name, self._key, authority), None)

    @property
    def root(self) -> Path:
        """The authority's own certificate."""
        return self.folder / "root.crt"

    def issue(self, name: str, common_name: str) -> tuple[Path, Path]:
        """A certificate and its key, for a server's host or a client's user of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        host = x509.SubjectAlternativeName([x509.DNSName(common_name)])
        self._write(name, self._signed(subject, key, host), key)
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def _signed(self, subject: x509.Name, key, extension) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(extension, critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate, key) -> None:
        (self.folder / f"{name}.crt").write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
        )
        if key is not None:
            private = (
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            (self.folder / f"{name}.key").touch(mode=0o600)
            (self.folder / f"{name}.key").write_bytes(key.private_bytes(*private))


@contextmanager
def tls_before(port: int, authority: Authority, host: str = "localhost") -> Iterator[int]:
    """A port that wants a client certificate by TLS, and passes all on to ``port``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", host))
    context.load_verify_locations(authority.root)
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_serve, args=(server, context, port), daemon=True).start()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def _serve(server: socket.socket, context: ssl.SSLContext, port: int) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_pass_on, args=(client, context, port), daemon=True).start()


def _pass_on(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with suppress(OSError), client:
        if client.recv(8) != _SSL_REQUEST:
            return
        client.sendall(b"S")
        with (
            context.wrap_socket(client, server_side=True) as inner,
            socket.create_connection(("127.0.0.1", port)) as outer,
        ):
            while True:
                waiting = [inner] if inner.pending() else select.select([inner, outer], [], [])[0]
                for one, other in ((inner, outer), (outer, inner)):
                    if one in waiting:
                        if not (data := one.recv(65536)):
                            return
                        other.sendall(data)
