"""This machine's settings for package sources, for build steps to see and images not to keep.

Mirrors, proxies and certificates differ from one build machine to the next. They are written into a folder that is
mounted while a step runs (image/base/common.sh reads it), so they are in no layer and in no history.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

MOUNTED = "/mnt"
CACHE = "uv-cache"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PASSED = (
    *("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL"),
    *("UV_EXTRA_INDEX_URL", "UV_INSECURE_HOST"),
)


def apt_settings(configuration: str) -> str:
    """Of the output of `apt-config dump`, how to reach package sources: proxies, checks, credentials."""
    lines = [line for line in configuration.splitlines() if line.startswith("Acquire::")]
    return "".join(f"{line}\n" for line in lines if "::IndexTargets::" not in line)


def apt_sources(targets: str, suite: str) -> str:
    """Of lines `ORIGIN|SUITE|deb ...` (from `apt-get indextargets`), those of this release of Debian."""
    found = []
    for line in targets.splitlines():
        origin, codename, source = line.split("|", 2)
        if origin == "Debian" and codename.split("-")[0] == suite and source not in found:
            found.append(source)
    return "".join(f"{source}\n" for source in found)


def environment(variables: Mapping[str, str], files: Iterable[str], cache: bool = True) -> str:
    """A shell script that sets what package clients in a build step must know.

    `files` are those beside it; `cache` tells whether uv's cache of this machine is mounted there too.
    """
    where = {name: f"{MOUNTED}/{name}" for name in files}
    settings = {name: variables[name] for name in PASSED if name in variables}
    if cache:
        settings |= {"UV_CACHE_DIR": f"{MOUNTED}/{CACHE}", "UV_LINK_MODE": "copy"}
    for variable, file in (
        ("APT_CONFIG", "apt.conf"), ("PIP_CONFIG_FILE", "pip.conf"), ("UV_CONFIG_FILE", "uv.toml"),
        ("SSL_CERT_FILE", "certificates.crt"), ("PIP_CERT", "certificates.crt"),
    ):  # fmt: skip
        if file in where:
            settings[variable] = where[file]
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())


def sources_of_debian(suite: str) -> str:
    """apt source lines of this machine for a release; empty when it is another system than Debian."""
    wanted = "$(ORIGIN)|$(RELEASE)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)"
    try:
        command = ["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"]
        return apt_sources(subprocess.run(command, capture_output=True, text=True, check=True).stdout, suite)
    except (OSError, subprocess.CalledProcessError):
        return ""


def write(folder: Path, suite: str, cache: bool = True) -> None:
    """Fills `folder`, which must be private (a proxy's address may hold a password), for `environment`."""
    files = {}
    if sources := sources_of_debian(suite):
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
        files["sources.list"] = sources
        files["apt.conf"] = apt_settings(dump) + (
            f'Dir::Etc::sourcelist "{MOUNTED}/sources.list";\nDir::Etc::sourceparts "-";\n'
            f'Acquire::https::CAInfo "{MOUNTED}/certificates.crt";\n'
        )
    home = Path.home()
    candidates = {
        "pip.conf": (os.environ.get("PIP_CONFIG_FILE"), home / ".config/pip/pip.conf", "/etc/pip.conf"),
        "uv.toml": (os.environ.get("UV_CONFIG_FILE"), home / ".config/uv/uv.toml", "/etc/uv/uv.toml"),
    }
    for name, paths in candidates.items():
        for path in paths:
            if path and Path(path).is_file():
                files[name] = Path(path).read_text()
                break
    for name, text in files.items():
        (folder / name).write_text(text)
    certificates = Path(os.environ.get("SSL_CERT_FILE") or CERTIFICATES)
    shutil.copyfile(certificates if certificates.is_file() else CERTIFICATES, folder / "certificates.crt")
    (folder / "environment").write_text(environment(os.environ, [*files, "certificates.crt"], cache))
    (folder / CACHE).mkdir()
