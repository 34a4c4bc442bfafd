//! Which system this is, and whether xtask may install on it.

use anyhow::{Context, Result, bail};

/// The part of `/etc/os-release` that set-up goes by.
#[derive(Debug, PartialEq, Eq)]
pub struct Os {
    /// `debian`, `ubuntu`, …
    pub id: String,
    /// The release's code name, empty where the system has none.
    pub codename: String,
}

impl Os {
    /// Reads it.
    pub fn detect() -> Result<Self> {
        let text = std::fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value.unwrap_or_default().trim().trim_matches(['"', '\'']).to_owned()
        };
        Self { id: field("ID"), codename: field("VERSION_CODENAME") }
    }

    /// An error unless set-up can use apt here: on Debian or Ubuntu, on x86-64, as root.
    pub fn require_apt(&self) -> Result<()> {
        if !matches!(self.id.as_str(), "debian" | "ubuntu") {
            let name = if self.id.is_empty() { "this system" } else { &self.id };
            bail!("it can be set up automatically on Debian and Ubuntu only, not on {name}");
        }
        if std::env::consts::ARCH != "x86_64" {
            bail!("it can be set up automatically on x86-64 only, not on {}", std::env::consts::ARCH);
        }
        if !rustix::process::geteuid().is_root() {
            bail!("it can be set up automatically as root only");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_quoted_and_plain_fields() {
        let os =
            Os::parse("NAME=\"Debian GNU/Linux\"\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\nID=debian\n");
        assert_eq!(os, Os { id: "debian".into(), codename: "bookworm".into() });
        let os = Os::parse("ID='ubuntu'\nVERSION_CODENAME=\"noble\"\n");
        assert_eq!(os, Os { id: "ubuntu".into(), codename: "noble".into() });
    }

    #[test]
    fn lacks_what_the_file_lacks() {
        assert_eq!(Os::parse("ID=arch\n"), Os { id: "arch".into(), codename: String::new() });
    }
}
