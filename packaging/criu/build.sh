#!/bin/sh
# Builds CRIU as one static program, which needs no library and no particular C library of the machine.
#
#     build.sh ARCHIVE PROGRAM LIBRARY
#
# ARCHIVE is the upstream archive of Debian's source package `criu`. LIBRARY is ckpt-run's library for CRIU, `entry.rs`.
# Needs the packages that BUILD-DEPENDS lists, and rustc.
set -eu
archive=$(realpath "$1")
program=$(realpath -m "$2")
library=$(realpath "$3")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xf "$archive" -C "$work" --strip-components=1

# CRIU takes every optional library that pkg-config finds. Here it finds only those below.
cat > "$work/pkg-config" <<'END'
#!/bin/sh
case "$*" in
*libnl-3.0* | *protobuf*) exec pkg-config "$@" ;;
*) exit 1 ;;
esac
END
chmod +x "$work/pkg-config"

# Its `ptrace`, `ioctl` and `pread64` are linked instead of those of the C library.
rustc --crate-name ckpt_criu --crate-type staticlib --edition 2024 -Copt-level=s -Cpanic=abort -o "$work/libckpt_criu.a" \
    "$library"

# Without GnuTLS (encrypted page servers) and nftables (locks of connections to other machines): ckpt-run uses neither.
make -C "$work" --jobs="$(nproc)" PKG_CONFIG="$work/pkg-config" NO_GNUTLS=1 WERROR=0 \
    LIBS="-L$work -lckpt_criu -Lsoccr/ -lsoccr -lprotobuf-c -lnl-3 -lnet -luuid -lbsd -lmd -static -lgcc_eh" criu
strip -o "$program" "$work/criu/criu"
