#!/bin/sh
# tools.sh LOCK
# Fills the stage that builds: Python, and uv beside these scripts.
set -eu
. "$(dirname "$0")/common.sh"
apt-get update -q
apt-get install -y -q --no-install-recommends python3 python3-venv ca-certificates
$python -m venv /opt/uv
/opt/uv/bin/pip install -q --disable-pip-version-check --require-hashes -r "$1"
mkdir "$here/bin"
cp /opt/uv/bin/uv "$uv"
