//! Python: PyTorch from the system's package; uvloop, LMDB, clients of CUDA and NVIDIA's libraries from PyPI, in virtual
//! environments.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::os::Os;
use super::{apt, finish, log_file, unfinished};
use crate::{process, say, workspace};

/// The system's Python. Another one on `PATH` (pyenv, conda) does not see the system's packages.
pub const PYTHON: &str = "/usr/bin/python3";

/// In each directory of wheels: what it was made from.
const REQUIREMENTS: &str = "requirements.txt";

/// In each virtual environment: its Python.
const VENV_PYTHON: &str = "bin/python3";

/// Finds PyTorch or installs the system's package of it, and returns its `torchrun`.
pub fn set_up_torch() -> Result<PathBuf> {
    let start = Instant::now();
    let mut how = String::new();
    let version = match torch_version() {
        Ok(version) => version,
        Err(missing) => {
            install_torch().with_context(|| {
                format!(
                    "{PYTHON} cannot import torch ({missing:#}), and it could not be set up; \
                     install PyTorch for {PYTHON}, on Debian and Ubuntu the package python3-torch"
                )
            })?;
            how = format!(" (installed in {})", say::duration(start.elapsed()));
            torch_version().context("python3-torch was installed, but does not work")?
        }
    };
    let torchrun = ["/usr/bin/torchrun", "/usr/local/bin/torchrun"].map(PathBuf::from);
    let torchrun = torchrun.into_iter().find(|path| path.is_file()).with_context(|| {
        format!("{PYTHON} has torch {version}, but there is no torchrun in /usr/bin or /usr/local/bin")
    })?;
    eprintln!("tools: torch {version} of {PYTHON}, {}{how}", torchrun.display());
    Ok(torchrun)
}

fn torch_version() -> Result<String> {
    let text = process::capture(python().args(["-c", "import torch; print(torch.__version__)"]))?;
    Ok(text.trim().to_owned())
}

fn install_torch() -> Result<()> {
    Os::detect()?.require_apt()?;
    let log = log_file("torch")?;
    eprintln!("tools: installing the system's package python3-torch, the log is {}", log.display());
    apt::install_system(&["python3-torch"], &log)
}

/// Packages of PyPI in a virtual environment of their own.
struct Wheels {
    /// What messages call it, and its directory below `target/tools`.
    name: &'static str,
    requirements: &'static [&'static str],
    /// Prints a line of versions, and fails if something does not work.
    check: &'static str,
    /// What it is for, if it cannot be had.
    purpose: &'static str,
}

const UVLOOP: Wheels = Wheels {
    name: "uvloop",
    // The version that was tested: it opens an io_uring when its loop starts, that is what the tests want it for.
    requirements: &["uvloop==0.22.1"],
    check: "import uvloop; uvloop.new_event_loop().close(); print('uvloop', uvloop.__version__)",
    purpose: "tests of io_uring",
};

/// Clients of the CUDA driver. All that has a CUDA version is of 13.0, the driver version that simcuda shows: a newer
/// compiler's PTX is too new for it.
const CUDA: Wheels = Wheels {
    name: "cuda-python",
    requirements: &[
        "cuda-bindings==13.0.3",
        "cuda-core==1.2.2",
        "cuda-pathfinder==1.9.0",
        "llvmlite==0.50.0",
        "numba==0.68.1",
        "numba-cuda==0.30.4",
        "numpy==2.4.6",
        "nvidia-cuda-nvrtc==13.0.88",
        "nvidia-cuda-runtime==13.0.96",
        "nvidia-ml-py==13.615.71",
        "nvidia-nvvm==13.0.88",
        "nvitop==1.7.2",
        "packaging==26.3",
        "psutil==7.2.2",
    ],
    check: "import importlib.metadata as m, cuda.bindings.driver, numba.cuda, nvitop, pynvml; \
            assert 'numba_cuda' in numba.cuda.__file__, numba.cuda.__file__; \
            print(*(f'{name} {m.version(name)}' for name in ('cuda-bindings', 'numba-cuda', 'numba')))",
    purpose: "tests of simcuda with Python programs",
};

/// What an independent reader of stores takes from others: hashes, decompression, decryption.
const STORE_READER: Wheels = Wheels {
    name: "store-reader",
    requirements: &[
        "blake3==1.0.11",
        "cffi==2.1.1",
        "cryptography==50.0.2",
        "pycparser==3.12",
        "zstandard==0.25.0",
    ],
    check: "import importlib.metadata as m, blake3, cryptography.hazmat.primitives.ciphers.aead, zstandard; \
            print(*(f'{name} {m.version(name)}' for name in ('blake3', 'cryptography', 'zstandard')))",
    purpose: "tests of the store's format",
};

/// NVIDIA's runtimes of three CUDA versions and its library of collectives, which are tested with NVIDIA's libcuda.
const NVIDIA: Wheels = Wheels {
    name: "nvidia-libraries",
    requirements: &[
        "nvidia-cuda-runtime==13.5.37",
        "nvidia-cuda-runtime-cu11==11.8.89",
        "nvidia-cuda-runtime-cu12==12.9.79",
        "nvidia-nccl-cu12==2.32.3",
    ],
    check: "import ctypes, nvidia; root = list(nvidia.__path__)[0]; \
            ctypes.CDLL(root + '/nccl/lib/libnccl.so.2'); \
            [ctypes.CDLL(root + '/' + name) for name in ('cuda_runtime/lib/libcudart.so.11.0', \
            'cuda_runtime/lib/libcudart.so.12', 'cu13/lib/libcudart.so.13')]; \
            print('libcudart 11.8, 12.9 and 13.5, NCCL 2.32 for CUDA 12')",
    purpose: "tests of NVIDIA's libraries",
};

/// The library of collectives with the runtime of CUDA 13 in it. It lies where the one for CUDA 12 lies.
const NCCL_13: Wheels = Wheels {
    name: "nvidia-nccl-13",
    requirements: &["nvidia-nccl-cu13==2.32.3"],
    check: "import ctypes, nvidia; ctypes.CDLL(list(nvidia.__path__)[0] + '/nccl/lib/libnccl.so.2'); \
            print('NCCL 2.32 for CUDA 13')",
    purpose: "tests of NVIDIA's libraries",
};

/// Frameworks that were built for CUDA, with the libraries that PyTorch 2.9.1 asks for: 8 GB.
const FRAMEWORKS: Wheels = Wheels {
    name: "cuda-frameworks",
    requirements: &[
        "Jinja2==3.1.6",
        "MarkupSafe==3.0.4",
        "cupy-cuda12x==13.6.0",
        "fastrlock==0.8.4",
        "filelock==4.2.12",
        "fsspec==2026.9.0",
        "jax==0.7.2",
        "jax-cuda12-pjrt==0.7.2",
        "jax-cuda12-plugin==0.7.2",
        "jaxlib==0.7.2",
        "llvmlite==0.44.0",
        "ml_dtypes==0.6.0",
        "mpmath==1.3.0",
        "networkx==3.6.1",
        "numba==0.61.2",
        "numpy==2.2.6",
        "nvidia-cublas-cu12==12.8.4.1",
        "nvidia-cuda-cupti-cu12==12.8.90",
        "nvidia-cuda-nvrtc-cu12==12.8.93",
        "nvidia-cuda-runtime-cu12==12.8.90",
        "nvidia-cudnn-cu12==9.10.2.21",
        "nvidia-cufft-cu12==11.3.3.83",
        "nvidia-cufile-cu12==1.13.1.3",
        "nvidia-curand-cu12==10.3.9.90",
        "nvidia-cusolver-cu12==11.7.3.90",
        "nvidia-cusparse-cu12==12.5.8.93",
        "nvidia-cusparselt-cu12==0.7.1",
        "nvidia-nccl-cu12==2.27.5",
        "nvidia-nvjitlink-cu12==12.8.93",
        "nvidia-nvshmem-cu12==3.3.20",
        "nvidia-nvtx-cu12==12.8.90",
        "opt_einsum==3.4.0",
        "scipy==1.17.1",
        "sympy==1.14.0",
        "torch==2.9.1",
        "triton==3.5.1",
        "typing_extensions==4.16.0",
    ],
    check: "import cupy, jax, numba, torch, triton; assert torch.version.cuda; \
            print('torch', torch.__version__, 'triton', triton.__version__, 'cupy', cupy.__version__, \
            'jax', jax.__version__, 'numba', numba.__version__)",
    purpose: "tests of frameworks with NVIDIA's libraries",
};

/// Free space for the set-up of [`FRAMEWORKS`], downloads included.
const FRAMEWORKS_BYTES: u64 = 16 << 30;

/// The schemas of Kubernetes' API.
const KUBERNETES: Wheels = Wheels {
    name: "kubernetes",
    requirements: &[
        "attrs==26.1.0",
        "importlib-resources==7.1.0",
        "jsonschema==4.26.0",
        "jsonschema-specifications==2025.9.1",
        "kubernetes-validate==1.37.0",
        "packaging==26.3",
        "PyYAML==6.0.3",
        "referencing==0.37.0",
        "rpds-py==2026.9.1",
        "typing-extensions==4.16.0",
    ],
    check: "import importlib.metadata as m, kubernetes_validate, yaml; \
            print('kubernetes-validate', m.version('kubernetes-validate'))",
    purpose: "tests of the Kubernetes example",
};

/// What links programs for an old glibc, and what packs wheels.
const DIST: Wheels = Wheels {
    name: "dist",
    requirements: &["cargo-zigbuild==0.24.1", "packaging==26.4", "wheel==0.48.0", "ziglang==0.17.1"],
    check: "import importlib.metadata as m, wheel; \
            print(*(f'{name} {m.version(name)}' for name in ('cargo-zigbuild', 'ziglang', 'wheel')))",
    purpose: "packages for users",
};

/// A database that is mapped into memory: one way of writing files that the tests have.
const LMDB: Wheels = Wheels {
    name: "lmdb",
    requirements: &["lmdb==3.0.0"],
    check: "import lmdb; lmdb.Environment; print('lmdb', lmdb.__version__)",
    purpose: "tests of a job's files",
};

/// One of the installers of Python packages that users have.
const UV: Wheels = Wheels {
    name: "uv",
    requirements: &["uv==0.13.9"],
    check: "import uv; from importlib.metadata import version; uv.find_uv_bin(); print('uv', version('uv'))",
    purpose: "tests of the packages for users",
};

/// Fetches uv and returns its program.
pub fn set_up_uv() -> Result<PathBuf> {
    Ok(site_packages(&UV.set_up()?)?.join("bin/uv"))
}

/// Fetches what `cargo xtask dist` builds with, and returns the directory that has it.
pub fn set_up_dist() -> Result<PathBuf> {
    site_packages(&DIST.set_up()?)
}

/// Fetches LMDB and returns the directory for `PYTHONPATH`: it is for the Python that has PyTorch.
pub fn set_up_lmdb() -> Result<PathBuf> {
    site_packages(&LMDB.set_up()?)
}

/// Fetches the schemas of Kubernetes' API with what checks a manifest against them, and returns the Python that has
/// it.
pub fn set_up_kubernetes() -> Result<PathBuf> {
    Ok(KUBERNETES.set_up()?.join(VENV_PYTHON))
}

/// Fetches what the reader of stores in tests/reader imports, and returns the Python that has it.
pub fn set_up_store_reader() -> Result<PathBuf> {
    Ok(STORE_READER.set_up()?.join(VENV_PYTHON))
}

/// Fetches uvloop and returns the directory for `PYTHONPATH`: it is for the Python that has PyTorch.
pub fn set_up_uvloop() -> Result<PathBuf> {
    site_packages(&UVLOOP.set_up()?)
}

/// Fetches cuda-bindings and numba-cuda, with the compiler that numba-cuda uses, and returns the Python that has
/// them. It has to be that one: both look for their libraries where packages are installed, not in `PYTHONPATH`.
pub fn set_up_cuda() -> Result<PathBuf> {
    Ok(CUDA.set_up()?.join(VENV_PYTHON))
}

/// Fetches NVIDIA's runtimes and its library of collectives, and returns the directory `nvidia` that has them.
pub fn set_up_nvidia_libraries() -> Result<PathBuf> {
    Ok(site_packages(&NVIDIA.set_up()?)?.join("nvidia"))
}

/// The same with the library of collectives for CUDA 13.
pub fn set_up_nccl_13() -> Result<PathBuf> {
    Ok(site_packages(&NCCL_13.set_up()?)?.join("nvidia"))
}

/// Fetches PyTorch's CUDA build, CuPy, JAX, numba and Triton, and returns the Python that has them.
pub fn set_up_frameworks() -> Result<PathBuf> {
    let tools = workspace::tools_dir();
    if !tools.join(FRAMEWORKS.name).exists() {
        let disk = rustix::fs::statvfs(&tools)
            .with_context(|| format!("asking for the space of {}", tools.display()))?;
        let free_bytes = disk.f_bavail * disk.f_frsize;
        ensure!(
            free_bytes >= FRAMEWORKS_BYTES,
            "frameworks for CUDA need {} GiB free at {}, there are {}",
            FRAMEWORKS_BYTES >> 30,
            tools.display(),
            free_bytes >> 30
        );
    }
    Ok(FRAMEWORKS.set_up()?.join(VENV_PYTHON))
}

impl Wheels {
    fn set_up(&self) -> Result<PathBuf> {
        let place = workspace::tools_dir().join(self.name);
        if self.is_set_up(&place)
            && let Ok(versions) = self.versions(&place)
        {
            eprintln!("tools: {versions}, {}", place.display());
            return Ok(place);
        }
        let start = Instant::now();
        let log = log_file(self.name)?;
        eprintln!("tools: getting {} from PyPI, the log is {}", self.requirements.join(" "), log.display());
        let work = unfinished()?;
        let built = work.path().join(self.name);
        let install = || -> Result<String> {
            // Without pip: Debian's Python cannot put it in.
            process::logged(python().args(["-m", "venv", "--without-pip"]).arg(&built), &log)?;
            let mut pip = find_pip(&log)?;
            pip.args(["install", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"])
                .args(["--implementation", "cp", "--python-version", &python_version()?])
                .args(["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64"])
                .args(["--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64"])
                .arg("--target")
                .arg(site_packages(&built)?)
                .args(self.requirements);
            process::logged(&mut pip, &log)?;
            std::fs::write(built.join(REQUIREMENTS), self.requirements.join("\n"))?;
            self.versions(&built)
        };
        let versions = install()
            .with_context(|| format!("{}, which {} need, could not be set up", self.name, self.purpose))?;
        finish(&built, &place)?;
        let took = say::duration(start.elapsed());
        eprintln!("tools: {versions}, {} (set up in {took})", place.display());
        Ok(place)
    }

    /// Whether the directory was made for these very requirements.
    fn is_set_up(&self, place: &Path) -> bool {
        std::fs::read_to_string(place.join(REQUIREMENTS))
            .is_ok_and(|text| text == self.requirements.join("\n"))
    }

    fn versions(&self, dir: &Path) -> Result<String> {
        let mut python = Command::new(dir.join(VENV_PYTHON));
        python.env_remove("PYTHONPATH").env_remove("PYTHONHOME").env("PYTHONNOUSERSITE", "1");
        Ok(process::capture(python.args(["-c", self.check]))?.trim().to_owned())
    }
}

/// Where packages are in a virtual environment.
fn site_packages(venv: &Path) -> Result<PathBuf> {
    Ok(venv.join(format!("lib/python{}/site-packages", python_version()?)))
}

/// A pip of any Python: the wheel is chosen by our own arguments, not by the Python that pip runs under.
fn find_pip(log: &Path) -> Result<Command> {
    let candidate = || {
        let pips = [vec!["python3", "-m", "pip"], vec![PYTHON, "-m", "pip"], vec!["pip3"]];
        pips.into_iter().find(|words| {
            let mut command = Command::new(words[0]);
            process::capture(command.args(&words[1..]).arg("--version")).is_ok()
        })
    };
    let words = match candidate() {
        Some(words) => words,
        None => {
            Os::detect()?.require_apt().context("there is no pip; install one")?;
            apt::install_system(&["python3-pip"], log)?;
            candidate().context("python3-pip was installed, but does not work")?
        }
    };
    let mut pip = Command::new(words[0]);
    pip.args(&words[1..]);
    Ok(pip)
}

/// The version of [`PYTHON`] as pip wants it, for instance `3.11`.
fn python_version() -> Result<String> {
    let script = "import sys; print('%d.%d' % sys.version_info[:2])";
    let text = process::capture(python().args(["-c", script]))?;
    let version = text.trim();
    if version.is_empty() {
        bail!("{PYTHON} does not tell its version");
    }
    Ok(version.to_owned())
}

/// The system's Python without what a user's environment would have it import.
fn python() -> Command {
    let mut command = Command::new(PYTHON);
    command.env_remove("PYTHONPATH").env_remove("PYTHONHOME").env("PYTHONNOUSERSITE", "1");
    command
}
