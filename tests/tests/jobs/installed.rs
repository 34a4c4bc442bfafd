//! The Python packages that `cargo xtask dist` makes, installed into bare systems that have nothing else of ckpt-run: a job
//! survives a kill there.

use ckpt_run_tests::Sandbox;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The variable with the directory of the wheels.
const WHEELS: &str = "CKPT_TEST_WHEELS";
/// The variable with the roots of bare systems that have Python, separated by colons.
const ROOTS: &str = "CKPT_TEST_BARE_ROOTS";

/// Makes a root of its own out of the one that is given, as in full.rs, and runs `install.sh` there. Its network has
/// no connection to another machine: everything that is installed comes from the wheels.
const ENTER: &str = r#"set -eu
given=$1 top=$2 wheels=$3 user=$4
ip link set lo up
mount -t tmpfs -o mode=0755 tmpfs "$top"
for path in bin sbin lib lib64; do
    cp -P "$given/$path" "$top/$path"
done
mkdir "$top/old" "$top/proc" "$top/run" "$top/tmp" "$top/home"
bind() {
    mkdir -p "$top$2"
    mount --rbind "$1" "$top$2"
}
bind "$given/usr" /usr
bind "$given/etc" /etc
bind /dev /dev
bind /sys /sys
bind "$wheels" /wheels
mount -t proc proc "$top/proc"
cp "$(dirname "$0")/install.sh" "$top/install.sh"
chmod 1777 "$top/tmp"
chown "$user:$user" "$top/home"
cd "$top"
pivot_root . old
umount -l /old
cd /home
if [ "$user" = 0 ]; then
    exec sh /install.sh
fi
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --bounding-set=-all sh /install.sh
"#;

/// What a new user does. Times are in milliseconds since the beginning of the installation.
const INSTALL: &str = r#"set -eu
begin=$(date +%s%3N)
passed() { echo "$1: $(($(date +%s%3N) - begin)) ms"; }
python3 -m venv venv
venv/bin/pip install --quiet --no-index --find-links /wheels 'ckpt-run[criu]'
passed installed
venv/bin/ckpt-run --version
venv/bin/ckpt-run doctor || true
venv/bin/ckpt-run demo
passed survived
for file in lib/libckpt_interpose.so share/man/man1/ckpt-run.1 share/bash-completion/completions/ckpt-run; do
    test -s "venv/$file"
done
"#;

/// Installs in each of the bare systems as this user, and runs the demo there.
fn survives(user: u32) {
    let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (Some(wheels), Some(roots)) = (named(WHEELS), named(ROOTS)) else {
        ckpt_test_skip::skip("cargo xtask test --full sets wheels and bare roots up");
        return;
    };
    for root in roots.split(':').map(Path::new) {
        let said = install(root, &PathBuf::from(&wheels), user);
        println!("{}, user {user}:\n{said}", root.display());
        for part in ["installed: ", "of the package ckpt-run-criu", "Equal: all 60 results", "survived: "] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

/// What was printed; fails if a step of the installation does.
fn install(root: &Path, wheels: &Path, user: u32) -> String {
    let sandbox = Sandbox::new();
    let top = tempfile::tempdir().unwrap();
    fs::write(sandbox.path().join("enter.sh"), ENTER).unwrap();
    fs::write(sandbox.path().join("install.sh"), INSTALL).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation", "private", "sh"]);
    command.arg(sandbox.path().join("enter.sh")).arg(root).arg(top.path()).arg(wheels).arg(user.to_string());
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/home");
    let output = command.stdin(std::process::Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", root.display());
    said.into_owned()
}

#[test]
fn a_job_survives_after_pip_install_in_a_bare_system() {
    survives(0);
}

#[test]
fn a_job_survives_after_pip_install_for_a_user_without_rights() {
    survives(1000);
}
