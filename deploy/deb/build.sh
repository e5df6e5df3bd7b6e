#!/usr/bin/env bash
# Builds the Debian package of the daemon: program with its dependencies, unit, account, configuration, manual pages and
# completions.  Needs dpkg-deb and pip, but not root; downloads the dependencies' wheels.  (Not nfpm, which works without
# dpkg: it is another download, and its packages differ from dpkg's.)
#
#   deploy/deb/build.sh [--wheel FILE] [--lib FOLDER] [FOLDER]      the package goes into FOLDER, by default dist/
#
#   --wheel FILE    pacecar's wheel, by default built from this checkout
#   --lib FOLDER    installed modules, including pacecar, to use instead of wheels
#
# One package serves several versions of python3: it has each C module once per version, which is in the file's name.
#   PYTHON           the interpreter that builds; its version must be in PYTHON_VERSIONS
#   PYTHON_VERSIONS  "3.11 3.12 3.13"
#   ARCH             amd64 or arm64, by default this machine's
#   MAINTAINER       the package's Maintainer field
#   PIP_FLAGS        further arguments for pip, such as another index
set -euo pipefail
umask 022

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
versions=${PYTHON_VERSIONS:-3.11 3.12 3.13}
wheel='' lib='' out=$root/dist

fail() {
  echo "build.sh: $1" >&2
  exit 1
}

while [[ $# -gt 0 ]]; do
  case $1 in
    --wheel | --lib)
      [[ $# -ge 2 ]] || fail "$1 needs a path"
      if [[ $1 == --wheel ]]; then wheel=$2; else lib=$2; fi
      shift 2
      ;;
    -*) fail "unknown option $1" ;;
    *)
      out=$1
      shift
      ;;
  esac
done
[[ -z $wheel || -z $lib ]] || fail "--wheel and --lib exclude each other"
command -v dpkg-deb >/dev/null || fail "dpkg-deb not found; install dpkg"
arch=${ARCH:-$(dpkg --print-architecture)}
case $arch in
  amd64) machine=x86_64 ;;
  arm64) machine=aarch64 ;;
  *) fail "ARCH=$arch: must be amd64 or arm64" ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/stage
pip=("$python" -m pip --disable-pip-version-check --quiet)

# Install the dependencies for each version and merge them: files without a version in their names must be equal.
collect() {
  local version folder file
  [[ -n $wheel ]] || {
    [[ -f $root/pyproject.toml ]] || fail "$here is not in a checkout; give --wheel"
    # From a copy with the same sources as the image: setuptools would leave its build folder in the checkout, and use an
    # older version's files from it.
    mkdir "$work/source"
    sed -n 's/^!//p' "$here/../container/Containerfile.dockerignore" | (cd "$root" && xargs -I{} cp -r {} "$work/source/")
    # shellcheck disable=SC2086  # a list of words
    "${pip[@]}" wheel ${PIP_FLAGS:-} --no-deps --wheel-dir "$work/wheel" "$work/source"
    wheel=$(echo "$work"/wheel/pacecar-*.whl)
  }
  mkdir -p "$stage/opt/pacecar/lib"
  for version in $versions; do
    folder=$work/lib-$version
    # shellcheck disable=SC2086  # a list of words
    "${pip[@]}" install ${PIP_FLAGS:-} --no-compile --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
      --platform "manylinux2014_$machine" --platform "manylinux_2_28_$machine" --target "$folder" \
      --requirement "$here/requirements.txt" "$wheel"
    rm -rf "${folder:?}/bin"
    while IFS= read -r -d '' file; do
      if [[ ! -e $stage/opt/pacecar/lib/$file ]]; then
        mkdir -p "$(dirname "$stage/opt/pacecar/lib/$file")"
        cp -p "$folder/$file" "$stage/opt/pacecar/lib/$file"
      elif [[ $file != *.dist-info/* ]]; then
        cmp -s "$folder/$file" "$stage/opt/pacecar/lib/$file" || fail "$file differs between versions of python"
      fi
    done < <(cd "$folder" && find . -type f -printf '%P\0')
  done
}

# put MODE FILE PATH: install FILE as PATH of the package.
put() {
  install -D -m "$1" "$2" "$stage/$3"
}

if [[ -n $lib ]]; then
  mkdir -p "$stage/opt/pacecar"
  cp -rL "$lib" "$stage/opt/pacecar/lib"
  find "$stage/opt/pacecar/lib" -depth -name __pycache__ -exec rm -r {} +
else
  collect
fi
chmod -R u=rwX,go=rX "$stage/opt/pacecar/lib"

mkdir -p "$stage/opt/pacecar/bin" "$stage/usr/bin"
cat >"$stage/opt/pacecar/bin/pacecar" <<'START'
#!/usr/bin/python3 -I
"""Starts pacecar with the modules beside it, whatever else is installed or set."""

import sys

sys.path.insert(0, "/opt/pacecar/lib")

from pacecar.commands.main import main

main()
START
chmod 755 "$stage/opt/pacecar/bin/pacecar"
# Absolute, which Debian requires of links between top-level folders.
ln -s /opt/pacecar/bin/pacecar "$stage/usr/bin/pacecar"
# The packed modules run here only if they are for this machine and python; otherwise install others that do.
native=$stage/opt/pacecar/lib
numbers=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
if [[ -z $lib && ($arch != $(dpkg --print-architecture) || " $versions " != *" $numbers "*) ]]; then
  native=$work/native
  # shellcheck disable=SC2086  # a list of words
  "${pip[@]}" install ${PIP_FLAGS:-} --no-deps --target "$native" --requirement "$here/requirements.txt" "$wheel"
fi
run() {
  PYTHONPATH=$native PYTHONDONTWRITEBYTECODE=1 "$python" -c 'from pacecar.commands.main import main; main()' "$@"
}
version=$(run version)
version=${version#pacecar }

put 644 "$here/../systemd/pacecar.service" usr/lib/systemd/system/pacecar.service
put 644 "$here/../systemd/sysusers.conf" usr/lib/sysusers.d/pacecar.conf
put 644 "$here/pacecar.toml" etc/pacecar/pacecar.toml
put 644 "$here/default.conf" etc/default/pacecar
put 644 "$here/copyright.txt" usr/share/doc/pacecar/copyright
run deploy man "$stage/usr/share/man" >"$work/pages"
gzip -9n "$stage"/usr/share/man/man1/*.1
for shell in bash:bash-completion/completions/pacecar zsh:zsh/vendor-completions/_pacecar fish:fish/vendor_completions.d/pacecar.fish; do
  run deploy completion "${shell%%:*}" >"$work/completion"
  put 644 "$work/completion" "usr/share/${shell#*:}"
done

mkdir -p "$stage/DEBIAN"
for script in preinst postinst prerm postrm; do put 755 "$here/$script.sh" "DEBIAN/$script"; done
printf '%s\n' /etc/pacecar/pacecar.toml /etc/default/pacecar >"$stage/DEBIAN/conffiles"
first=${versions%% *} last=${versions##* }
cat >"$stage/DEBIAN/control" <<CONTROL
Package: pacecar
Version: $version-1
Architecture: $arch
Maintainer: ${MAINTAINER:-who built it <root@localhost>}
Installed-Size: $(du -sk --exclude=DEBIAN "$stage" | cut -f1)
Depends: python3 (>= $first), python3 (<< 3.$((${last#3.} + 1))), libc6 (>= 2.28), init-system-helpers (>= 1.54~), systemd | systemd-standalone-sysusers | systemd-sysusers
Section: admin
Priority: optional
Description: performance monitoring of distributed PyTorch training: the daemon
 One daemon a node samples GPUs, links and host, hears the training jobs of
 the node, and serves metrics for Prometheus and a page. It observes: it needs
 no right and sets nothing on any device.
 .
 Training jobs install pacecar beside their own PyTorch, with pip.
CONTROL
(cd "$stage" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)

# Reproducible builds: dpkg-deb clamps modification times to this time.
if [[ -z ${SOURCE_DATE_EPOCH:-} ]]; then
  SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct 2>/dev/null || date +%s)
fi
export SOURCE_DATE_EPOCH
find "$stage" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
mkdir -p "$out"
dpkg-deb --root-owner-group --build "$stage" "$out/pacecar_$version-1_$arch.deb" >"$work/built"
echo "$out/pacecar_$version-1_$arch.deb"
