//! The options: one table from which the flags, the `CKPT_*` variables, the keys of `ckpt-run.toml`, their help and
//! `ckpt-run config` are made.

use crate::failure::bad_input;
use crate::interpose::Interposer;
use crate::namespace::Network;
use anyhow::{Context, Result, anyhow};
use ckpt_snapshot::JobKey;
use clap::{Arg, ArgAction, ArgMatches};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file that is read when `--config` names no other.
const DEFAULT_FILE: &str = "ckpt-run.toml";

/// One option.
pub struct Setting {
    /// Flag and key; the variable is `CKPT_` and the name in capitals.
    pub name: &'static str,
    short: Option<char>,
    value: Option<&'static str>,
    default: &'static str,
    help: &'static str,
    long_help: &'static str,
}

/// All options, in the order of the help.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "store",
        short: Some('s'),
        value: Some("DIR"),
        default: "./.ckpt-run",
        help: "Where snapshots are kept",
        long_help: "Where snapshots are kept. A snapshot is the memory of your job, secrets included: the directory is made so that only you can read it. Put it on a disk that survives what the job shall survive.",
    },
    Setting {
        name: "job",
        short: Some('j'),
        value: Some("NAME"),
        default: "",
        help: "The job's name [default: made from its command line and directory]",
        long_help: "The job's name in the store. Without it, the same command line in the same working directory is the same job. With it, the name alone decides: a changed command line still resumes.",
    },
    Setting {
        name: "interval",
        short: Some('i'),
        value: Some("TIME"),
        default: "10m",
        help: "Take a snapshot this often, or `off`",
        long_help: "Take a snapshot this often (`90s`, `10m`, `1h 30m`), or `off` for only when asked by `ckpt-run checkpoint`.",
    },
    Setting {
        name: "keep",
        short: Some('k'),
        value: Some("N"),
        default: "3",
        help: "Keep this many snapshots of a job",
        long_help: "Keep this many snapshots of a job. Older ones are removed only after a newer one is safely stored; the last good one is never removed.",
    },
    Setting {
        name: "resume",
        short: Some('r'),
        value: Some("WHICH"),
        default: "auto",
        help: "auto, never, required, or a snapshot's ID",
        long_help: "What to do with snapshots of an earlier run of this job:\n  auto      resume the newest one that is whole, or start if there is none\n  never     start from the beginning\n  required  resume, or fail if there is nothing to resume\n  ID        resume this one",
    },
    Setting {
        name: "criu",
        short: None,
        value: Some("PATH"),
        default: "",
        help: "The CRIU to use [default: the one in PATH]",
        long_help: "The CRIU to use, version 4.1 or newer. Default: the one in PATH, then /usr/local/sbin, /usr/sbin, /sbin.",
    },
    Setting {
        name: "freeze-timeout",
        short: None,
        value: Some("TIME"),
        default: "60s",
        help: "Give a checkpoint up when the job stood still for this long",
        long_help: "Give a checkpoint up when the job stood still for this long, and let the job go on.",
    },
    Setting {
        name: "network",
        short: None,
        value: Some("WHICH"),
        default: "host",
        help: "host, or private: a network of the job's own",
        long_help: "Which network the job sees:\n  host     the machine's. When the job is resumed, the ports that it used must be free\n  private  one of its own with a loopback interface only: its ports are never taken, and it reaches nothing outside",
    },
    Setting {
        name: "interpose",
        short: None,
        value: Some("WHICH"),
        default: "auto",
        help: "auto, off, or the path of libckpt_interpose.so to preload",
        long_help: "Whether libckpt_interpose.so is preloaded into every process of the job. It takes what they have on a GPU off it for a snapshot, and puts it back:\n  auto  if it lies beside ckpt-run or in ../lib, and the loader would find a CUDA driver (libcuda.so.1)\n  off   never. A job that uses a GPU cannot be saved then\n  PATH  this one, always\n`ckpt-run config` says what auto comes to.",
    },
    Setting {
        name: "log-file",
        short: None,
        value: Some("FILE"),
        default: "",
        help: "Also write ckpt-run's own messages to this file, with times",
        long_help: "Also write ckpt-run's own messages to this file, with times and details.",
    },
    Setting {
        name: "verbose",
        short: Some('v'),
        value: None,
        default: "0",
        help: "Say more (-vv: everything)",
        long_help: "Say more about what ckpt-run does. Given twice: everything.",
    },
    Setting {
        name: "quiet",
        short: Some('q'),
        value: None,
        default: "0",
        help: "Say less (-qq: errors only)",
        long_help: "Say less: only warnings and errors. Given twice: only errors.",
    },
];

impl Setting {
    fn variable(&self) -> String {
        format!("CKPT_{}", self.name.to_uppercase().replace('-', "_"))
    }

    fn arg(&self) -> Arg {
        let variable = self.variable();
        let default = match (self.default, self.value) {
            ("", _) | (_, None) => String::new(),
            (default, Some(_)) => format!(" [default: {default}]"),
        };
        let arg = Arg::new(self.name)
            .long(self.name)
            .global(true)
            .help(format!("{}{default}", self.help))
            .long_help(format!("{}\n{default} [variable: {variable}]", self.long_help));
        let arg = match self.short {
            Some(short) => arg.short(short),
            None => arg,
        };
        match self.value {
            Some(value) => arg.value_name(value).action(ArgAction::Set),
            None => arg.action(ArgAction::Count),
        }
    }
}

/// The flags of all options, and `--config`.
pub fn args() -> impl Iterator<Item = Arg> {
    let file = Arg::new("config")
        .long("config")
        .global(true)
        .value_name("FILE")
        .help(format!("Read options from this file [default: {DEFAULT_FILE}, if there is one]"))
        .long_help(format!(
            "Read options from this file: one `name = value` per line, names as the flags. Default: {DEFAULT_FILE} in the working directory, if there is one. A flag wins over a variable, a variable over the file. [variable: CKPT_CONFIG]"
        ));
    SETTINGS.iter().map(Setting::arg).chain(std::iter::once(file))
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The command line.
    Flag,
    /// An environment variable.
    Variable(String),
    /// A configuration file.
    File(PathBuf),
    /// Nobody said anything.
    Default,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flag => out.write_str("command line"),
            Self::Variable(name) => write!(out, "variable {name}"),
            Self::File(path) => out.write_str(&path.display().to_string()),
            Self::Default => out.write_str("default"),
        }
    }
}

/// One option with its value as text.
#[derive(Clone, Debug, Serialize)]
pub struct Resolved {
    /// The option.
    pub name: &'static str,
    /// Its value; empty means none.
    pub value: String,
    /// Where that comes from.
    pub origin: Origin,
    /// What that comes to on this machine, where the value does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
}

/// What to do about earlier snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Resume if there is something to resume.
    Auto,
    /// Start from the beginning.
    Never,
    /// Resume or fail.
    Required,
    /// Resume this one.
    Snapshot(String),
}

/// The effective options.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where snapshots are kept.
    pub store: PathBuf,
    /// The job's name, if it was given one.
    pub job: Option<JobKey>,
    /// Time between snapshots; `None` is off.
    pub interval: Option<Duration>,
    /// Snapshots to keep.
    pub keep: usize,
    /// What to do about earlier snapshots.
    pub resume: Resume,
    /// The CRIU to use.
    pub criu: Option<PathBuf>,
    /// The longest that the job may stand still.
    pub freeze_timeout: Duration,
    /// Which network the job sees.
    pub network: Network,
    /// Whether the interposer is preloaded into the job's processes.
    pub interpose: Interposer,
    /// Where messages also go.
    pub log_file: Option<PathBuf>,
    /// More (positive) or fewer (negative) messages.
    pub verbosity: i32,
    /// Every option with its origin, for `ckpt-run config`.
    pub resolved: Vec<Resolved>,
}

impl Config {
    /// Puts flags, variables and file together.
    ///
    /// # Errors
    /// Bad input: a value that does not parse, a file that does not read; says which and where it came from.
    pub fn resolve(matches: &ArgMatches, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let file =
            File::read(matches.get_one::<String>("config").cloned().or_else(|| variable("CKPT_CONFIG")))?;
        let pick = |setting: &Setting| {
            let flag = match setting.value {
                Some(_) => matches.get_one::<String>(setting.name).cloned(),
                None => Some(matches.get_count(setting.name))
                    .filter(|&count| count > 0)
                    .map(|count| count.to_string()),
            };
            let name = setting.variable();
            let (value, origin) = flag
                .map(|value| (value, Origin::Flag))
                .or_else(|| {
                    variable(&name)
                        .filter(|value| !value.is_empty())
                        .map(|value| (value, Origin::Variable(name)))
                })
                .or_else(|| file.value(setting.name))
                .unwrap_or_else(|| (setting.default.to_owned(), Origin::Default));
            Resolved { name: setting.name, value, origin, found: None }
        };
        Self::parse(SETTINGS.iter().map(pick).collect())
    }

    fn parse(mut resolved: Vec<Resolved>) -> Result<Self> {
        let interpose =
            resolved.iter_mut().find(|one| one.name == "interpose").expect("every setting is resolved");
        let wanted = "auto, off or the path of libckpt_interpose.so";
        let interposer = typed(interpose, wanted, Interposer::parse)?;
        interpose.found = (interpose.value == "auto").then(|| interposer.to_string());
        let find =
            |name: &str| resolved.iter().find(|one| one.name == name).expect("every setting is resolved");
        let optional_path =
            |name| Some(find(name).value.as_str()).filter(|value| !value.is_empty()).map(PathBuf::from);
        let count =
            |name| typed(find(name), "a number", |text| text.parse::<i32>().ok().filter(|&count| count >= 0));
        let job = match find("job").value.as_str() {
            "" => None,
            name => Some(JobKey::named(name).map_err(bad_input)?),
        };
        let store = find("store");
        let store = typed(store, "a directory", |text| (!text.is_empty()).then(|| PathBuf::from(text)))?;
        Ok(Self {
            store,
            job,
            interval: typed(find("interval"), "a time such as 10m, or off", |text| match text {
                "off" => Some(None),
                text => duration(text).map(Some),
            })?,
            keep: typed(find("keep"), "a number from 1", |text| text.parse().ok().filter(|&keep| keep > 0))?,
            resume: match find("resume").value.as_str() {
                "auto" => Resume::Auto,
                "never" => Resume::Never,
                "required" => Resume::Required,
                id => Resume::Snapshot(id.to_owned()),
            },
            criu: optional_path("criu"),
            freeze_timeout: typed(find("freeze-timeout"), "a time such as 60s", duration)?,
            network: typed(find("network"), "host or private", |text| match text {
                "host" => Some(Network::Host),
                "private" => Some(Network::Private),
                _ => None,
            })?,
            interpose: interposer,
            log_file: optional_path("log-file"),
            verbosity: count("verbose")? - count("quiet")?,
            resolved,
        })
    }
}

fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|duration| !duration.is_zero())
}

fn typed<T>(resolved: &Resolved, wanted: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T> {
    let Resolved { name, value, origin, .. } = resolved;
    parse(value).ok_or_else(|| bad_input(anyhow!("{name} = {value:?} ({origin}): this has to be {wanted}")))
}

/// A configuration file.
struct File {
    path: PathBuf,
    table: toml::Table,
}

impl File {
    fn read(named: Option<String>) -> Result<Self> {
        let path = PathBuf::from(named.as_deref().unwrap_or(DEFAULT_FILE));
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => String::new(),
            Err(error) => return Err(bad_input(anyhow!("cannot read {}: {error}", path.display()))),
        };
        let table: toml::Table = text
            .parse()
            .with_context(|| format!("{} is not valid TOML", path.display()))
            .map_err(bad_input)?;
        Self::check(&path, &table).map_err(bad_input)?;
        Ok(Self { path, table })
    }

    fn check(path: &Path, table: &toml::Table) -> Result<()> {
        for (key, value) in table {
            let known = || SETTINGS.iter().map(|setting| setting.name).collect::<Vec<_>>().join(", ");
            if !SETTINGS.iter().any(|setting| setting.name == key) {
                return Err(anyhow!(
                    "{}: there is no option {key:?}; the options are {}",
                    path.display(),
                    known()
                ));
            }
            if !value.is_str() && !value.is_integer() {
                return Err(anyhow!("{}: {key} has to be text in quotes or a number", path.display()));
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Option<(String, Origin)> {
        let text = match self.table.get(name)? {
            toml::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        Some((text, Origin::File(self.path.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn resolve(args: &[&str], variables: &[(&str, &str)]) -> Result<Config> {
        let command = clap::Command::new("test").args(super::args());
        let matches = command.try_get_matches_from(std::iter::once(&"test").chain(args)).unwrap();
        let find = |name: &str| variables.iter().find(|one| one.0 == name).map(|one| one.1.to_owned());
        Config::resolve(&matches, &find)
    }

    fn file(content: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content.as_bytes()).unwrap();
        file
    }

    #[test]
    fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
        let file = file("interval = \"30m\"\nkeep = 7\nstore = \"/c\"\n");
        let path = file.path().to_str().unwrap();
        let variables = [("CKPT_INTERVAL", "20m"), ("CKPT_STORE", "/b"), ("CKPT_CONFIG", path)];
        let config = resolve(&["--store", "/a"], &variables).unwrap();
        assert_eq!(config.store, PathBuf::from("/a"));
        assert_eq!(config.interval, Some(Duration::from_secs(1200)));
        assert_eq!(config.keep, 7);
        assert_eq!(config.freeze_timeout, Duration::from_secs(60));
        let origin = |name: &str| config.resolved.iter().find(|one| one.name == name).unwrap().origin.clone();
        assert_eq!(origin("store"), Origin::Flag);
        assert_eq!(origin("interval"), Origin::Variable("CKPT_INTERVAL".into()));
        assert_eq!(origin("keep"), Origin::File(path.into()));
        assert_eq!(origin("network"), Origin::Default);
    }

    #[test]
    fn bad_values_say_which_and_where_from() {
        let message =
            |args: &[&str], variables: &[(&str, &str)]| resolve(args, variables).unwrap_err().to_string();
        assert!(message(&["--keep", "0"], &[]).contains("keep = \"0\" (command line)"));
        assert!(message(&[], &[("CKPT_INTERVAL", "soon")]).contains("(variable CKPT_INTERVAL)"));
        assert!(message(&["--interval", "0s"], &[]).contains("10m, or off"));
        assert!(message(&["--network", "none"], &[]).contains("host or private"));
        assert!(message(&["--job", "../x"], &[]).contains("job's name"));
        assert!(message(&["--config", "/nonexistent.toml"], &[]).contains("/nonexistent.toml"));
        let typo = file("intervall = \"3m\"\n");
        assert!(
            message(&["--config", typo.path().to_str().unwrap()], &[]).contains("no option \"intervall\"")
        );
    }

    #[test]
    fn auto_is_told_with_what_it_comes_to() {
        let interpose = |args: &[&str]| {
            let config = resolve(args, &[]).unwrap();
            let resolved = config.resolved.iter().find(|one| one.name == "interpose").unwrap().clone();
            (config.interpose, resolved.found)
        };
        let (interposer, found) = interpose(&[]);
        assert_eq!(found, Some(interposer.to_string()));
        assert_eq!(interpose(&["--interpose", "off"]).1, None);
        let error = resolve(&["--interpose", "/nonexistent.so"], &[]).unwrap_err().to_string();
        assert!(error.contains("(command line)") && error.contains("auto, off or"), "{error}");
    }

    #[test]
    fn off_and_counts() {
        let config = resolve(&["--interval", "off", "-vv", "-q"], &[]).unwrap();
        assert_eq!(config.interval, None);
        assert_eq!(config.verbosity, 1);
        assert_eq!(resolve(&[], &[("CKPT_QUIET", "2")]).unwrap().verbosity, -2);
    }
}
