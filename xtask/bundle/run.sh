#!/bin/bash
# Tries ckpt-run on this machine: run.sh [STAGE…]; without names, all stages. See README.md beside this file.
set -u
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) || exit 2
refuse() {
    echo "run.sh: $*" >&2
    exit 2
}
[ "$(uname -sm)" = "Linux x86_64" ] || refuse "this is $(uname -sm); the bundle's programs are for Linux on x86-64"
[ "$(id -u)" = 0 ] || refuse "checkpoints by CRIU need root: run it as root"
python=${BUNDLE_PYTHON:-$(command -v python3)} || refuse "there is no python3 on PATH; name one in BUNDLE_PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' || refuse "$python does not run, or is older than 3.8"
# A copy may have lost it.
chmod +x "$here"/bin/* "$here"/criu/bin/* "$here"/criu/lib/ld-* "$here"/criu/sbin/* 2>/dev/null
export BUNDLE_PYTHON=$python OUT=${OUT:-./out} PYTHONDONTWRITEBYTECODE=1
# Mounts of its own, so that none is left behind however this ends.
isolate=()
if unshare --mount --propagation private true 2>/dev/null; then
    isolate=(unshare --mount --propagation private)
fi
exec "${isolate[@]}" "$python" -I -B "$here/harness/main.py" "$@"
