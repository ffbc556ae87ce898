"""Installs and removes the operator with its Helm chart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stack.kubernetes import Kubernetes

CHART = Path(__file__).resolve().parents[2] / "charts" / "sm70-operator"
RELEASE = "sm70-operator"
NAMESPACE = "sm70-system"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{RELEASE}"
"""The operator's user, as the audit log names it."""


def install(cluster: Kubernetes, *, operator_image: str, engine_cpu_image: str, values: Mapping[str, str] = {}) -> None:
    """Installs or upgrades the chart and waits until the operator is ready.

    `values` are further `--set-string` pairs, for tests that shorten periods.
    """
    repository, _, tag = operator_image.rpartition(":")
    settings = {"image.repository": repository, "image.tag": tag, "engineImages.cpu": engine_cpu_image, **values}
    # Helm installs the CRDs of a chart only once and never upgrades them; server-side apply does both.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"))
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace", "--skip-crds",
        "--wait", "--timeout", "120s",
        *(part for key, value in sorted(settings.items()) for part in ("--set-string", f"{key}={value}")),
    )  # fmt: skip


def uninstall(cluster: Kubernetes) -> None:
    """Removes the release; the CRDs, and with them everybody's services, stay."""
    cluster.helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait")
