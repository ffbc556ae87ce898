#!/bin/sh
# environment.sh LOCK
# Fills /opt/sm70 from a lock with hashes. Nothing is resolved: the lock is complete.
set -eu
. "$(dirname "$0")/common.sh"
$uv venv -q --python $python /opt/sm70
$uv pip install -q --compile-bytecode --python /opt/sm70/bin/python --no-deps --require-hashes -r "$1"
rm -rf /tmp/uv-cache
