#!/bin/sh
# Puts everything that the Makefile's targets need on a bare Debian 12: packages, uv, and the test environment in .venv.
# Safe to run again: what is there is kept, and a run that finds everything takes well under a second.
#
#   tools/bootstrap.sh           system packages and the test environment
#   tools/bootstrap.sh python    the test environment only (no root needed)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
cache=${SM70_CACHE:-$HOME/.cache/sm70}
mkdir -p "$cache"

packages="python3 python3-venv python3-dev git ca-certificates iproute2 iptables util-linux procps kmod runc mmdebstrap buildah skopeo g++ libnuma1 libgomp1"
if [ "${1:-all}" = all ]; then
  missing=""
  for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
  done
  if [ -n "$missing" ]; then
    [ "$(id -u)" = 0 ] || { echo "bootstrap: must run as root to install:$missing" >&2; exit 2; }
    echo "bootstrap: installing$missing"
    apt-get update -q >"$cache/apt.log" 2>&1 || { cat "$cache/apt.log" >&2; exit 1; }
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >>"$cache/apt.log" 2>&1 ||
      { tail -20 "$cache/apt.log" >&2; exit 1; }
  fi
fi

# uv refuses nothing that pip accepts, caches downloads (pip does not always), and installs in seconds.
uv=$cache/uv/bin/uv
version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' "$root/requirements/uv.lock")
if [ "$("$uv" --version 2>/dev/null | cut -d' ' -f2)" != "$version" ]; then
  rm -rf "$cache/uv"
  python3 -m venv "$cache/uv"
  "$cache/uv/bin/pip" install -q --disable-pip-version-check --require-hashes -r "$root/requirements/uv.lock"
fi

stamp=$(cat "$root/requirements/dev.lock" "$root/requirements/build.lock" "$root/pyproject.toml" "$0" | sha256sum | cut -c1-16)
if [ "$(cat "$root/.venv/.stamp" 2>/dev/null)" != "$stamp-$root" ]; then
  echo "bootstrap: filling .venv"
  export UV_NO_PROGRESS=1 UV_HTTP_TIMEOUT=300
  "$uv" venv -q --no-config --clear --python "$(command -v python3)" "$root/.venv"
  "$uv" pip install -q --no-config --python "$root/.venv/bin/python" --require-hashes -r "$root/requirements/dev.lock"
  "$uv" pip install -q --no-config --python "$root/.venv/bin/python" --require-hashes -r "$root/requirements/build.lock"
  # uv leaves bytecode to the first import; some environments switch that off, and every start pays.
  env -u PYTHONDONTWRITEBYTECODE "$root/.venv/bin/python" -m compileall -q -j 0 "$root/.venv/lib" >/dev/null 2>&1 || true
  "$uv" pip install -q --no-config --python "$root/.venv/bin/python" --no-deps --no-build-isolation -e "$root"
  echo "$stamp-$root" >"$root/.venv/.stamp"
fi
