#!/bin/sh
# kernels.sh PROJECT TARGET
# Compiles the kernels of a checkout and lays them out below TARGET as they will lie in /opt/sm70. The compiler comes
# from package wheels, by PROJECT/requirements/kernels.lock.
set -eu
. "$(dirname "$0")/common.sh"
objects=$2/opt/sm70/lib/python3.11/site-packages/sm70_engine/kernels/objects
mkdir -p "$objects"
PATH=$here/bin:$PATH SM70_CACHE=/tmp/sm70 PYTHONPATH=$1/engine $python -c '
import sys
from pathlib import Path

from sm70_engine.kernels.build import export

export(Path(sys.argv[1]))
' "$objects"
