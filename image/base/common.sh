# Sourced by the scripts beside it, which run in build stages. What this build machine has set up for its package
# sources (mirrors, proxies, certificates) is mounted at /mnt for the time of a step and therefore in no layer; with an
# ordinary `docker build` nothing is there, and Debian's and Python's public sources are used.
if [ -f /mnt/environment ]; then
  . /mnt/environment
fi
export DEBIAN_FRONTEND=noninteractive UV_NO_PROGRESS=1 UV_HTTP_TIMEOUT=300
# Downloads are kept by the build machine, or not at all.
export UV_CACHE_DIR=${UV_CACHE_DIR:-/tmp/uv-cache}
# A bytecode file holds whatever time its source got in a layer, and no start looks for it.
export PYC_INVALIDATION_MODE=UNCHECKED_HASH
unset PYTHONDONTWRITEBYTECODE
here=$(dirname "$0")
python=/usr/bin/python3.11
uv=$here/bin/uv

# install_apart TARGET ARGUMENT...
# Installs into /opt/sm70, and copies what that added to the same place below TARGET: a layer of its own.
install_apart() {
  apart=$1
  shift
  $python "$here/added.py" list /opt/sm70 >/tmp/before
  $uv pip install -q --compile-bytecode --python /opt/sm70/bin/python --no-deps "$@"
  $python "$here/added.py" copy /opt/sm70 /tmp/before "$apart"
}
