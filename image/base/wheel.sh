#!/bin/sh
# wheel.sh LOCK PROJECT TARGET
# Builds the wheel of a project with the build tools of LOCK, and lays it out below TARGET as it will lie in /opt/sm70.
set -eu
. "$(dirname "$0")/common.sh"
$uv venv -q --python $python /opt/build
$uv pip install -q --python /opt/build/bin/python --require-hashes -r "$1"
(cd "$2" && SOURCE_DATE_EPOCH=315532800 /opt/build/bin/python -m hatchling build -t wheel -d /tmp/wheel)
# An environment at the path of the one in the image, so that the scripts name the right interpreter.
$uv venv -q --python $python /opt/sm70
install_apart "$3" /tmp/wheel/*.whl
