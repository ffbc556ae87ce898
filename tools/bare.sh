#!/usr/bin/env bash
# Shows that `make demo` (or another target) needs nothing but what README.md names: it runs in a debootstrapped Debian 12
# with empty caches, in its own mount and PID namespace.
#
#   tools/bare.sh [TARGETS]    default: demo; "demo test" runs both, one after the other. The root file system goes to
#                              $SM70_CACHE/bare and is removed afterwards unless SM70_KEEP_BARE=1; SM70_RESUME_BARE=1
#                              goes on in such a root
# It shares the host's network, so it takes down its own cluster by name: `make clean-cluster` would find everybody's.
# The machine's package-source settings (apt, certificates, name resolution, pip's and Go's variables) are bound into it;
# they are the machine's own and no part of what is shown.
set -euo pipefail
target=${1:-demo}
log=${target// /+}.log
source=$(cd "$(dirname "$0")/.." && pwd)
bare=${SM70_CACHE:-$HOME/.cache/sm70}/bare
root=$bare/root
[ "$(id -u)" = 0 ] || { echo "bare: must run as root (chroot and mounts)" >&2; exit 2; }
free=$(df --output=avail -BG "$(dirname "$bare")" | tail -1 | tr -dc 0-9)

if [ "${SM70_RESUME_BARE:-0}" = 1 ] && [ -d "$root/srv/sm70" ]; then
  echo "bare: going on in the root of the last run, with the caches that it filled"
  git -C "$root/srv/sm70" pull --quiet "$source"
else
[ "$free" -ge 40 ] || { echo "bare: needs 40 GB of free disk for a second set of caches; found $free GB" >&2; exit 2; }
rm -rf "$bare"
mkdir -p "$bare"
echo "bare: making a minimal Debian 12"
mmdebstrap --quiet --variant=minbase --include=git,make,ca-certificates bookworm "$root" /etc/apt/sources.list.d/* 2>"$bare/mmdebstrap.log" ||
  mmdebstrap --quiet --variant=minbase --include=git,make,ca-certificates bookworm "$root" 2>>"$bare/mmdebstrap.log" ||
  { cat "$bare/mmdebstrap.log" >&2; exit 1; }
git clone --quiet --no-hardlinks "$source" "$root/srv/sm70"
rm -rf "$root/etc/apt/sources.list" "$root/etc/apt/sources.list.d"
touch "$root/etc/resolv.conf" "$root/etc/hosts" "$root/etc/apt/sources.list"
mkdir -p "$root/etc/apt/sources.list.d"
fi

cat >"$bare/inside.sh" <<'EOF'
set -eu
root=$1 target=$2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/run"
for path in /etc/resolv.conf /etc/hosts /etc/apt/sources.list /etc/apt/sources.list.d /etc/apt/apt.conf.d /etc/ssl/certs \
            /usr/share/keyrings /etc/pip.conf; do
  [ -e "$path" ] || continue
  [ -d "$path" ] && mkdir -p "$root$path" || { mkdir -p "$(dirname "$root$path")"; touch "$root$path"; }
  mount --bind "$path" "$root$path"
done
settings=$(env | grep -E '^(PIP_CERT|PIP_INDEX_URL|SSL_CERT_FILE|SSL_CERT_DIR|GOPROXY|GOSUMDB|GOFLAGS|UV_[A-Z_]*|https?_proxy|HTTPS?_PROXY|no_proxy)=' || true)
# The namespace's own root, and not a chroot: container tools remount it, and who enters the namespace finds it.
cd "$root"
pivot_root . .
umount --lazy .
# shellcheck disable=SC2086  # one NAME=value a word
exec chroot . /usr/bin/env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  LANG=C.UTF-8 PYTHONPATH=tests:tools $settings \
  /bin/sh -c "cd /srv/sm70; code=0; for step in $target; do
    start=\$(date +%s); make \$step || code=\$?; echo \"bare: make \$step: \$((\$(date +%s) - start)) s, exit status \$code\"
    [ \$code = 0 ] || break; done
    .venv/bin/python -m testcluster down --name demo; exit \$code"
EOF
start=$(date +%s)
code=0
unshare --mount --pid --fork --kill-child sh "$bare/inside.sh" "$root" "$target" 2>&1 | tee "$bare/$log" || code=$?
echo "bare: \`make $target\` took $(( $(date +%s) - start )) s; log in the cache under bare/$log"
du -sh --exclude=proc --exclude=sys "$root"/root*/.cache 2>/dev/null || true
if [ "${SM70_KEEP_BARE:-0}" != 1 ]; then cp "$bare/$log" "$bare/../bare-$log"; rm -rf "$root"; fi
exit "$code"
