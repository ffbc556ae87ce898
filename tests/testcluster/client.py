"""kubectl and helm as the administrator of a cluster, and the few calls that tests need again and again."""

from __future__ import annotations

import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testcluster.errors import CommandError


class Client(ABC):
    @property
    @abstractmethod
    def kubeconfig(self) -> Path: ...

    @property
    @abstractmethod
    def kubectl_path(self) -> Path: ...

    @property
    @abstractmethod
    def helm_path(self) -> Path: ...

    def environment(self) -> dict[str, str]:
        """This process's environment, with KUBECONFIG, and with kubectl and helm first in PATH."""
        folders = dict.fromkeys([str(self.kubectl_path.parent), str(self.helm_path.parent), os.environ["PATH"]])
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": ":".join(folders)}

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """kubectl's standard output. Raises CommandError with its words."""
        return self._command([str(self.kubectl_path), *words], stdin)

    def helm(self, *words: str, stdin: str | None = None) -> str:
        """helm's standard output. Raises CommandError with its words."""
        return self._command([str(self.helm_path), *words], stdin)

    def apply(self, *objects: Mapping[str, Any], manager: str = "test") -> None:
        """Server-side apply of complete objects, in this order."""
        words = ["apply", "--server-side", "--force-conflicts", f"--field-manager={manager}", "-f", "-"]
        self.kubectl(*words, stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """An object, or None if there is none of this name."""
        text = self.kubectl("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def items(self, kind: str, namespace: str | None = "default", selector: str = "") -> list[dict[str, Any]]:
        """All objects of a kind, in one namespace or (None) in all."""
        where = ["-n", namespace] if namespace else ["-A"]
        chosen = ["-l", selector] if selector else []
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *where, *chosen, "-o", "json"))["items"]
        return found

    def raw(self, path: str) -> str | None:
        """GET as the administrator; None for any answer but 200."""
        try:
            return self.kubectl("get", "--raw", path)
        except CommandError:
            return None

    def _command(self, words: Sequence[str], stdin: str | None) -> str:
        done = subprocess.run(words, input=stdin, env=self.environment(), text=True, capture_output=True, check=False)
        if done.returncode:
            raise CommandError([Path(words[0]).name, *words[1:]], done.returncode, done.stderr or done.stdout)
        return done.stdout
