"""Settings of this machine's package sources, as build steps are shown them."""

from __future__ import annotations

import subprocess

from imagekit import machine


def test_only_this_release_of_debian_is_taken() -> None:
    targets = "\n".join(
        [
            "Debian|bookworm|deb http://mirror.test/debian/ bookworm main",
            "Debian|bookworm|deb http://mirror.test/debian/ bookworm main",
            "Debian|bookworm-security|deb http://mirror.test/security/ bookworm-security main",
            "Debian|trixie|deb http://mirror.test/debian/ trixie main",
            "Vendor|bookworm|deb http://vendor.test/ bookworm main",
        ]
    )
    assert machine.apt_sources(targets, "bookworm").splitlines() == [
        "deb http://mirror.test/debian/ bookworm main",
        "deb http://mirror.test/security/ bookworm-security main",
    ]


def test_how_to_reach_sources_is_kept_and_what_to_fetch_is_not() -> None:
    dump = "\n".join(
        [
            'APT::Architecture "amd64";',
            'Acquire::http::Proxy "http://proxy.test:3128";',
            'Acquire::IndexTargets::deb::DEP-11::MetaKey "x";',
            'DPkg::Post-Invoke:: "something";',
        ]
    )
    assert machine.apt_settings(dump) == 'Acquire::http::Proxy "http://proxy.test:3128";\n'


def test_the_environment_script_quotes_and_passes_only_what_package_clients_need() -> None:
    variables = {
        "https_proxy": "http://user:it's@proxy.test",
        "UV_DEFAULT_INDEX": "http://index.test",
        "TOKEN": "secret",
    }
    script = machine.environment(variables, ["apt.conf", "certificates.crt"])
    assert "secret" not in script
    show = 'printf "%s\\n" "$https_proxy" "$UV_DEFAULT_INDEX" "$APT_CONFIG" "$SSL_CERT_FILE" "${PIP_CONFIG_FILE-none}"'
    shown = subprocess.run(["sh", "-c", script + show], capture_output=True, text=True, check=True, env={})
    assert shown.stdout.splitlines() == [
        "http://user:it's@proxy.test", "http://index.test", "/mnt/apt.conf", "/mnt/certificates.crt", "none",
    ]  # fmt: skip


def test_without_a_shared_cache_none_is_named() -> None:
    assert "UV_CACHE_DIR=/mnt/" in machine.environment({}, [])
    assert machine.environment({}, [], cache=False) == ""
