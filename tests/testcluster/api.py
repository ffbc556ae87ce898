"""GET requests to a cluster's API server as its administrator, without a Kubernetes client."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Api:
    host: str
    pki: Path

    def get(self, path: str, seconds: float = 5) -> str | None:
        """The body of a 200 answer; None for any other, or if the server does not answer in time."""
        try:
            context = ssl.create_default_context(cafile=str(self.pki / "ca.crt"))
            context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
            connection = http.client.HTTPSConnection(self.host, 6443, timeout=seconds, context=context)
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                body = answer.read().decode()
                return body if answer.status == 200 else None
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return None
