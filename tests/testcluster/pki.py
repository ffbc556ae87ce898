"""The certificates and kubeconfigs of a throwaway cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test-cluster")])


class Authority:
    """A certificate authority whose files live in one folder; what exists is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        certificate, key = folder / "ca.crt", folder / "ca.key"
        if not certificate.exists():
            own = self.private_key("ca")
            extension = x509.BasicConstraints(ca=True, path_length=None)
            builder = self._builder(NAME, own).add_extension(extension, critical=True)
            certificate.write_bytes(builder.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        loaded = serialization.load_pem_private_key(key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        self.key = loaded

    def private_key(self, name: str) -> ec.EllipticCurvePrivateKey:
        """Writes NAME.key in the form `EC PRIVATE KEY`; the API server refuses a PKCS8 key for service accounts."""
        key = ec.generate_private_key(ec.SECP256R1())
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        return key

    def issue(self, name: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        """Writes NAME.crt and NAME.key, for a client and, given hosts, for a server."""
        if (self.folder / f"{name}.crt").exists():
            return
        key = self.private_key(name)
        subject = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject.append(x509.NameAttribute(NameOID.COMMON_NAME, user))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(x509.Name(subject), key).add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def kubeconfig(self, path: Path, server: str, name: str) -> None:
        """Writes a kubeconfig (JSON is YAML too) that authenticates with NAME's certificate."""

        def data(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [
                        {"name": "test", "cluster": {"server": server, "certificate-authority-data": data("ca.crt")}}
                    ],
                    "users": [
                        {
                            "name": name,
                            "user": {
                                "client-certificate-data": data(f"{name}.crt"),
                                "client-key-data": data(f"{name}.key"),
                            },
                        }
                    ],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
                },
                indent=1,
            )
        )

    @staticmethod
    def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(NAME)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=30))
        )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
