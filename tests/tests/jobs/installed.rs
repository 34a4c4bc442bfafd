//! What `cargo xtask dist` makes, installed into bare systems that have nothing else of ckpt-run: a job survives a kill there.

use ckpt_run_tests::virtual_machine::{self, Hardware, VirtualMachine};
use ckpt_run_tests::{Sandbox, workspace};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// The variable with the directory of the packages.
const PACKAGES: &str = "CKPT_TEST_PACKAGES";
/// The variable with the roots of bare systems that have Python and rpm, separated by colons.
const ROOTS: &str = "CKPT_TEST_BARE_ROOTS";
/// The variable with the program `uv`.
const UV: &str = "CKPT_TEST_UV";

/// The variable with the program `buildah`.
const BUILDAH: &str = "CKPT_TEST_BUILDAH";

/// Makes a copy of the root that is given and runs `install.sh` there. Its network has no connection to another machine:
/// everything that is installed comes from the packages.
const ENTER: &str = r#"set -eu
given=$1 top=$2 packages=$3 uv=$4 user=$5 how=$6
ip link set lo up
mount -t tmpfs -o mode=0755 tmpfs "$top"
cp -a "$given/." "$top"
mkdir -p "$top/old" "$top/packages" "$top/home"
for path in dev sys; do
    mount --rbind "/$path" "$top/$path"
done
mount --bind "$packages" "$top/packages"
mount -t proc proc "$top/proc"
cp "$(dirname "$0")/install.sh" "$top/install.sh"
cp "$uv" "$top/usr/local/bin/uv"
chown "$user:$user" "$top/home"
cd "$top"
pivot_root . old
umount -l /old
cd /home
if [ "$user" = 0 ]; then
    exec sh /install.sh "$how"
fi
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all --bounding-set=-all sh /install.sh "$how"
"#;

/// What a new user does. Times are in milliseconds since the beginning of the installation.
const INSTALL: &str = r#"set -eu
begin=$(date +%s%3N)
passed() { echo "$1: $(($(date +%s%3N) - begin)) ms"; }
with_pip() {
    python3 -m venv venv
    venv/bin/pip install --quiet --no-index --find-links /packages "$1"
}
case $1 in
pip)
    with_pip 'ckpt-run[criu]'
    prefix=venv ckpt_run=venv/bin/ckpt-run
    ;;
uv)
    uv --quiet --offline tool install --no-index --find-links /packages --python /usr/bin/python3 'ckpt-run[criu]'
    prefix=$HOME/.local/share/uv/tools/ckpt-run ckpt_run=$HOME/.local/bin/ckpt-run
    ;;
pipx)
    # pip, setuptools and wheel are from Debian's packages.
    PIP_NO_INDEX=1 PIP_FIND_LINKS='/packages /usr/share/python-wheels' pipx install 'ckpt-run[criu]'
    ckpt_run=$HOME/.local/bin/ckpt-run
    prefix=$(dirname "$(dirname "$(readlink -f "$ckpt_run")")")
    ;;
deb | rpm)
    if [ "$1" = deb ]; then
        dpkg --install /packages/ckpt-run_*.deb
    else
        # What it needs is there, but rpm does not know of it.
        rpm --install --nodeps /packages/ckpt-run-*.rpm
    fi
    with_pip ckpt-run-criu
    export CKPT_CRIU=/home/venv/lib/ckpt-run/criu
    prefix=/usr ckpt_run=ckpt-run
    ;;
esac
passed installed
$ckpt_run --version
$ckpt_run doctor || true
$ckpt_run demo
passed survived
for file in lib/libckpt_interpose.so share/man/man1/ckpt-run.1 share/bash-completion/completions/ckpt-run; do
    test -s "$prefix/$file"
done
"#;

/// The value of a variable, if it has one.
fn named(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// What a command prints; fails if the command does.
fn said_by(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    said.into_owned()
}

/// Installs in each of the bare systems in this way, as this user, and runs the demo there.
fn survives(how: &str, user: u32) {
    let (Some(packages), Some(roots), Some(uv)) = (named(PACKAGES), named(ROOTS), named(UV)) else {
        ckpt_test_skip::needs_full();
        return;
    };
    for root in roots.split(':').map(Path::new) {
        let said = install(root, [&packages, &uv, &user.to_string(), how]);
        println!("{how} in {}, user {user}:\n{said}", root.display());
        let criu = if matches!(how, "deb" | "rpm") {
            "/home/venv/lib/ckpt-run/criu"
        } else {
            "of the package ckpt-run-criu"
        };
        for part in ["installed: ", criu, "Equal: all 60 results", "survived: "] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }
}

/// What was printed; fails if a step of the installation does.
fn install(root: &Path, arguments: [&str; 4]) -> String {
    let sandbox = Sandbox::new();
    let top = tempfile::tempdir().unwrap();
    fs::write(sandbox.path().join("enter.sh"), ENTER).unwrap();
    fs::write(sandbox.path().join("install.sh"), INSTALL).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation", "private", "sh"]);
    command.arg(sandbox.path().join("enter.sh")).arg(root).arg(top.path()).args(arguments);
    command.env_clear().env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/home");
    said_by(&mut command)
}

#[test]
fn a_job_survives_after_pip_install_in_a_bare_system() {
    survives("pip", 0);
}

#[test]
fn a_job_survives_after_pip_install_for_a_user_without_rights() {
    survives("pip", 1000);
}

#[test]
fn a_job_survives_after_uv_tool_install_in_a_bare_system() {
    survives("uv", 0);
}

#[test]
fn a_job_survives_after_uv_tool_install_for_a_user_without_rights() {
    survives("uv", 1000);
}

#[test]
fn a_job_survives_after_pipx_install_in_a_bare_system() {
    survives("pipx", 0);
}

#[test]
fn a_job_survives_after_pipx_install_for_a_user_without_rights() {
    survives("pipx", 1000);
}

#[test]
fn a_job_survives_after_the_installation_of_the_deb() {
    survives("deb", 0);
}

#[test]
fn a_job_survives_after_the_installation_of_the_rpm() {
    survives("rpm", 0);
}

/// Builds the image from a bare system instead of one that is pulled, and runs the demo in it. buildah's isolation by
/// chroot needs no rights that a container lacks.
const IMAGE: &str = r#"set -eu
packages=$1 base=$2 dir=$3 dockerfile=$4
storage() { buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs "$@"; }
container=$(storage from scratch)
storage copy --quiet "$container" "$base" /
storage commit --quiet "$container" localhost/base
mkdir "$dir/context"
cp "$packages"/*.whl "$dir/context"
storage build --isolation chroot --pull-never --build-arg BASE=localhost/base --file "$dockerfile" \
    --tag localhost/ckpt-run "$dir/context"
storage from --security-opt seccomp=unconfined --name run localhost/ckpt-run
storage run --isolation chroot \
    --cap-add CAP_SYS_ADMIN,CAP_SYS_PTRACE,CAP_NET_ADMIN,CAP_SYS_TIME,CAP_DAC_READ_SEARCH run ckpt-run demo
"#;

#[test]
fn a_job_survives_in_the_image() {
    let (Some(packages), Some(roots), Some(_)) = (named(PACKAGES), named(ROOTS), named(BUILDAH)) else {
        ckpt_test_skip::needs_full();
        return;
    };
    let sandbox = Sandbox::new();
    let dockerfile = workspace().join("packaging/container/Dockerfile");
    let root = roots.split(':').next().unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", IMAGE, "sh"]);
    command.args([&packages, root]).arg(sandbox.path()).arg(dockerfile);
    let said = said_by(&mut command);
    println!("{said}");
    assert!(said.contains("Equal: all 60 results"), "{said}");
}

/// The demo's job has no Python there.
#[test]
fn a_job_survives_on_arm64() {
    let (Some(packages), Some(tool)) = (std::env::var_os(PACKAGES), virtual_machine::arm64_tool()) else {
        ckpt_test_skip::needs_full();
        return;
    };
    let wheels = fs::read_dir(packages).unwrap().map(|entry| entry.unwrap().path());
    let is_for_arm64 = |path: &Path| path.to_string_lossy().ends_with("_aarch64.whl");
    let wheel = wheels.into_iter().find(|path| is_for_arm64(path)).expect("a wheel for arm64");
    let _alone = virtual_machine::alone();
    let sandbox = Sandbox::new();
    let disk = sandbox.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let hardware = Hardware { cores: 2, memory_mib: 2048, disk: &disk, network: None };
    let machine = VirtualMachine::boot(&tool, &sandbox.path().join("machine"), hardware);
    let unpack =
        Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(machine.shared()).status();
    assert!(unpack.unwrap().success());
    let said = machine.ok("set -e
        cp ckpt_run-*.data/scripts/ckpt-run /tmp/ckpt-run
        chmod +x /tmp/ckpt-run
        cd /tmp
        ./ckpt-run doctor
        ./ckpt-run demo --plain
        ./ckpt-run sh -c 'exit 7' && exit 1 || echo \"exit code $?\"
        ./ckpt-run sh -c 'kill -9 $$' && exit 1 || echo \"exit code $?\"");
    println!("{said}");
    assert!(said.contains("Plain jobs: yes.") && said.contains("is for x86-64 only"), "{said}");
    assert!(said.contains("Equal: all 60 results"), "{said}");
    assert!(said.contains("\nexit code 7\n") && said.contains("\nexit code 137\n"), "{said}");
}
