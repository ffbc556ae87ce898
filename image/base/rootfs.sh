#!/bin/sh
# rootfs.sh TARGET PACKAGE...
# Lays out a root file system that holds these Debian packages and what they depend on, and nothing else: no package
# manager, no maintainer scripts. What a scanner needs to know of each package lies in /var/lib/dpkg/status.d.
set -eu
. "$(dirname "$0")/common.sh"
target=$1
shift
debs=/tmp/debs
mkdir -p "$debs/partial" "$target"
: >/tmp/status # apt plans for a machine on which nothing is installed
apt-get update -q
apt-get install -y -q --no-install-recommends --download-only -o Dir::State::status=/tmp/status \
  -o Dir::Cache::archives="$debs" -o APT::Sandbox::User=root base-files "$@"
# The certificates alone: their package wants OpenSSL's program and Perl, for a script that is a `cat` here.
(cd "$debs" && apt-get download -q -o APT::Sandbox::User=root ca-certificates)
# Only maintainer scripts want these, and none runs.
rm -f "$debs"/dpkg_*.deb "$debs"/tar_*.deb "$debs"/mawk_*.deb "$debs"/debconf_*.deb "$debs"/perl-base_*.deb

for folder in bin sbin lib lib64; do # Debian 12 has these merged into /usr
  mkdir -p "$target/usr/$folder"
  ln -s "usr/$folder" "$target/$folder"
done
# The build mounts at /mnt and /srv.
mkdir -p "$target/var/lib/dpkg/status.d" "$target/mnt" "$target/srv" "$target/etc/ssl/certs"
for deb in "$debs"/*.deb; do
  dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$target" --keep-directory-symlink \
    --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' --exclude='./usr/share/info/*' \
    --exclude='./usr/share/lintian/*' --exclude='./usr/share/bug/*' --exclude='./usr/lib/x86_64-linux-gnu/gconv/*'
  dpkg-deb -f "$deb" >"$target/var/lib/dpkg/status.d/$(dpkg-deb -f "$deb" Package)"
done
# Of the documentation, the licences stay.
find "$target/usr/share/doc" -type f ! -name copyright -delete
find "$target/usr/share/doc" -depth -type d -empty -delete

cat "$target"/usr/share/ca-certificates/mozilla/*.crt >"$target/etc/ssl/certs/ca-certificates.crt"
cat >"$target/etc/passwd" <<'END'
root:x:0:0:root:/root:/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin
sm70:x:65532:65532:sm70:/tmp:/sbin/nologin
END
cat >"$target/etc/group" <<'END'
root:x:0:
nogroup:x:65534:
sm70:x:65532:
END
echo 'hosts: files dns' >"$target/etc/nsswitch.conf"
chmod 1777 "$target/tmp"
find "$target" -type f -perm /6000 -exec chmod a-s {} + # nothing here has to become root
# What the packages' own scripts would have done.
$python -m compileall -q --invalidation-mode unchecked-hash -s "$target" "$target/usr/lib/python3.11"
ldconfig -r "$target"
rm -rf "$debs" /tmp/status
