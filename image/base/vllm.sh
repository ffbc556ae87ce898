#!/bin/sh
# vllm.sh TOOLS LOCK TARGET
# Builds vLLM (LOCK) from its source with the build tools of TOOLS, without CUDA extensions (its own target `empty`: only
# Python files), and lays it out below TARGET as it will lie in /opt/sm70. torch must be in /opt/sm70: the build asks it.
set -eu
. "$(dirname "$0")/common.sh"
$uv pip install -q --python /opt/sm70/bin/python --no-deps --require-hashes -r "$1"
export VLLM_TARGET_DEVICE=empty
install_apart "$3" --require-hashes --no-build-isolation --no-binary vllm -r "$2"
