//! apt: the system's own, and a private one that leaves the system's alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::os::Os;
use crate::process;

/// A suite of a distribution and where to get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The mirror, one that the system itself uses.
    pub uri: String,
    /// For instance `trixie` or `trixie-security`.
    pub suite: String,
}

/// The places that `suite` of the same distribution is to be had from: the system's own mirrors, its own suite's name
/// exchanged for `suite`. The first is the suite proper; its `-updates` and `-security` follow where the system uses
/// its own.
pub fn sources(os: &Os, suite: &str) -> Result<Vec<Source>> {
    // --no-release-info: without it apt tells only of what `apt-get update` has fetched, in a fresh container nothing.
    let text = process::capture(Command::new("apt-get").args([
        "--no-release-info",
        "indextargets",
        "--format",
        "$(REPO_URI) $(RELEASE) $(CREATED_BY)",
    ]))?;
    let sources = renamed_sources(&text, &os.codename, suite);
    if sources.first().is_none_or(|source| source.suite != suite) {
        bail!("apt's configuration names no mirror for {} {}", os.id, os.codename);
    }
    Ok(sources)
}

fn renamed_sources(index_targets: &str, codename: &str, suite: &str) -> Vec<Source> {
    let find = |suffix: &str| {
        let release = format!("{codename}{suffix}");
        let uri = index_targets.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let uri = words.next()?;
            (words.next()? == release && words.next()? == "Packages").then_some(uri)
        })?;
        Some(Source { uri: uri.to_owned(), suite: format!("{suite}{suffix}") })
    };
    ["", "-updates", "-security"].into_iter().filter_map(find).collect()
}

/// A part of a distribution's archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// Free software.
    Free,
    /// What may be distributed, but is not free software.
    NonFree,
    /// The sources of free software.
    SourceCode,
}

/// An apt with its own sources, lists and cache, that believes that nothing is installed: so it resolves every
/// dependency, libc included, and downloads it.
pub struct PrivateApt {
    dir: PathBuf,
    config: PathBuf,
}

impl PrivateApt {
    /// Makes one in `dir`, for `suite` of the distribution that runs here. Its packages must be signed by that
    /// distribution's key.
    pub fn create(dir: &Path, os: &Os, suite: &str, section: Section) -> Result<Self> {
        Self::create_for(dir, os, suite, section, "amd64")
    }

    /// The same for packages of another architecture.
    pub fn create_for(
        dir: &Path,
        os: &Os,
        suite: &str,
        section: Section,
        architecture: &str,
    ) -> Result<Self> {
        let Archive { types, components, keyring } = archive(os, section)?;
        ensure!(keyring.exists(), "{} is missing, so that packages could not be verified", keyring.display());
        let sources = sources(os, suite)?;
        for sub in ["parts", "state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(sub))
                .with_context(|| format!("creating {}", dir.join(sub).display()))?;
        }
        let stanza = |source: &Source| {
            format!(
                "Types: {types}\nURIs: {}\nSuites: {}\nComponents: {components}\nArchitectures: {architecture}\nSigned-By: {}\n",
                source.uri,
                source.suite,
                keyring.display()
            )
        };
        let stanzas: Vec<_> = sources.iter().map(stanza).collect();
        let write = |name: &str, text: &str| {
            let file = dir.join(name);
            fs::write(&file, text).with_context(|| format!("writing {}", file.display())).map(|()| file)
        };
        write("status", "")?;
        write("parts/private.sources", &stanzas.join("\n"))?;
        let config = write("apt.conf", &private_config(dir, architecture))?;
        Ok(Self { dir: dir.to_path_buf(), config })
    }

    /// Fetches the package lists.
    pub fn update(&self, log: &Path) -> Result<()> {
        process::logged(self.apt_get().args(["--error-on=any", "update"]), log)
    }

    /// Downloads packages with all that they depend on, and returns the files.
    pub fn download(&self, packages: &[&str], log: &Path) -> Result<Vec<PathBuf>> {
        process::logged(self.apt_get().args(["-y", "--download-only", "install"]).args(packages), log)?;
        self.downloaded(packages)
    }

    /// Downloads packages without what they depend on, and returns the files.
    pub fn download_alone(&self, packages: &[&str], log: &Path) -> Result<Vec<PathBuf>> {
        let mut command = self.apt_get();
        command.arg("download").args(packages).current_dir(self.archives());
        process::logged(&mut command, log)?;
        self.downloaded(packages)
    }

    /// Downloads the archive of a package's sources, without the distribution's changes, and returns the file.
    pub fn download_source(&self, package: &str, log: &Path) -> Result<PathBuf> {
        let mut command = self.apt_get();
        command.args(["source", "--download-only", "--tar-only", package]).current_dir(self.archives());
        process::logged(&mut command, log)?;
        let mut files = self.files(|name| name.contains(".orig.tar."))?;
        files.pop().with_context(|| format!("apt-get downloaded no sources of {package}"))
    }

    fn archives(&self) -> PathBuf {
        self.dir.join("cache/archives")
    }

    fn downloaded(&self, packages: &[&str]) -> Result<Vec<PathBuf>> {
        let files = self.files(|name| name.ends_with(".deb"))?;
        if files.is_empty() {
            bail!("apt-get downloaded no package for {}", packages.join(" "));
        }
        Ok(files)
    }

    /// The downloaded files with such names, sorted.
    fn files(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
        let archives = self.archives();
        let mut files = Vec::new();
        for entry in fs::read_dir(&archives).with_context(|| format!("reading {}", archives.display()))? {
            let entry = entry?;
            if is_wanted(&entry.file_name().to_string_lossy()) {
                files.push(entry.path());
            }
        }
        files.sort();
        Ok(files)
    }

    /// The record of the version of a package that would be downloaded.
    pub fn show(&self, package: &str) -> Result<String> {
        let mut command = Command::new("apt-cache");
        process::capture(command.arg("-c").arg(&self.config).args(["--no-all-versions", "show", package]))
    }

    fn apt_get(&self) -> Command {
        // -c and not APT_CONFIG: the system's configuration (proxies) is read too, and must not win over ours.
        let mut command = apt_get();
        command.arg("-c").arg(&self.config);
        command
    }
}

/// How packages are taken from a distribution's archive.
struct Archive {
    /// `deb` for packages, `deb-src` for sources.
    types: &'static str,
    components: &'static str,
    /// The keys that the archive is signed with.
    keyring: &'static Path,
}

fn archive(os: &Os, section: Section) -> Result<Archive> {
    let types = if section == Section::SourceCode { "deb-src" } else { "deb" };
    let debian = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg");
    let ubuntu = Path::new("/usr/share/keyrings/ubuntu-archive-keyring.gpg");
    let (components, keyring) = match (os.id.as_str(), section) {
        ("debian", Section::Free | Section::SourceCode) => ("main", debian),
        ("debian", Section::NonFree) => ("non-free", debian),
        // Not tried: the project's machines are Debian's.
        ("ubuntu", Section::Free | Section::SourceCode) => ("main universe", ubuntu),
        (other, _) => bail!("no archive of {other} with these packages is known"),
    };
    Ok(Archive { types, components, keyring })
}

/// Unpacks packages into a directory; nothing is installed, no script of theirs runs. Returns their names, one a line.
pub fn unpack(packages: &[PathBuf], to: &Path, log: &Path) -> Result<String> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let mut names = String::new();
    for package in packages {
        process::logged(Command::new("dpkg").arg("-x").arg(package).arg(to), log)?;
        names += &format!("{}\n", package.file_name().unwrap_or_default().to_string_lossy());
    }
    Ok(names)
}

fn private_config(dir: &Path, architecture: &str) -> String {
    let dir = dir.display();
    format!(
        r#"#clear APT::Architectures;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
Acquire::Retries "3";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{dir}/parts";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "{dir}/state";
Dir::State::Lists "{dir}/state/lists";
Dir::State::status "{dir}/status";
Dir::Cache "{dir}/cache";
Dir::Cache::Archives "{dir}/cache/archives";
Dir::Log "{dir}";
"#
    )
}

/// Installs packages into the system itself.
pub fn install_system(packages: &[&str], log: &Path) -> Result<()> {
    process::logged(apt_get().arg("update"), log)?;
    process::logged(apt_get().args(["install", "-y", "--no-install-recommends"]).args(packages), log)
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    // Another may be at work on this machine, and a mirror may be silent.
    let patient = ["DPkg::Lock::Timeout=300", "Acquire::Retries=3", "Acquire::http::Timeout=60"];
    command.args(patient.iter().flat_map(|option| ["-o", option]));
    command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C.UTF-8");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: &str = "mirror:/debian/ bookworm DEP-11\n\
        mirror:/debian/ bookworm Packages\n\
        mirror:/debian/ bookworm-updates Packages\n\
        mirror:/security/ bookworm-security Packages\n\
        other:/tools/ stable Packages\n";

    #[test]
    fn takes_the_mirrors_of_the_systems_own_suite() {
        let source = |uri: &str, suite: &str| Source { uri: uri.into(), suite: suite.into() };
        assert_eq!(
            renamed_sources(TARGETS, "bookworm", "trixie"),
            [
                source("mirror:/debian/", "trixie"),
                source("mirror:/debian/", "trixie-updates"),
                source("mirror:/security/", "trixie-security"),
            ]
        );
    }

    #[test]
    fn finds_nothing_for_another_release() {
        assert_eq!(renamed_sources(TARGETS, "bullseye", "trixie"), []);
    }
}
