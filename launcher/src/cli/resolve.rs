//! From flags, variables and the configuration file to the effective options.

use crate::cli::args::similar;
use crate::cli::config::Config;
use crate::cli::settings::{CONFIG_FILE, SETTINGS, Setting, TRUST};
use crate::cli::values::{Origin, Resolved};
use crate::sys::error::bad_input;
use crate::sys::trust::{OpenError, Trust};
use anyhow::{Context, Result, anyhow};

use ckpt_object_medium::Service;
use clap::ArgMatches;
use std::io;
use std::path::PathBuf;

impl Config {
    /// Combines flags, variables and file; a flag takes precedence over a variable, and a variable over the file.
    ///
    /// # Errors
    /// Bad input: a value that does not parse, a file that cannot be read. The message names the value and its origin.
    pub fn resolve(matches: &ArgMatches, variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let pick = |setting: &Setting, file: &File| {
            let name = setting.variable();
            let value = variable(&name).filter(|value| !value.is_empty());
            let (value, origin) = flag(matches, setting)
                .map(|value| (value, Origin::Flag))
                .or_else(|| value.map(|value| (value, Origin::Variable(name))))
                .or_else(|| file.value(setting.name))
                .unwrap_or_else(|| (setting.default.to_owned(), Origin::Default));
            Resolved { name: setting.name, value, origin, found: None }
        };
        let none = File::default();
        let mut config = Self::default();
        (TRUST.set)(&mut config, &mut pick(&TRUST, &none))?;
        let file = File::read(&pick(&CONFIG_FILE, &none), &config.store.trust)?;
        for setting in SETTINGS {
            let mut option = pick(setting, &file);
            (setting.set)(&mut config, &mut option)?;
            config.resolved.push(option.redacted());
        }
        if let Some(upload) = config.store.upload.as_ref().filter(|url| url.service() == Service::Http) {
            return Err(bad_input(anyhow!(
                "--upload {upload}: a web server can only be read from. Name s3://…, gs://…, az://… or file:///…"
            )));
        }
        if let (Some(store), Some(_)) = (&config.store.url, &config.store.upload) {
            return Err(bad_input(anyhow!(
                "--upload copies snapshots from a store on disk, and {store} is not on disk: leave --upload out, or give --store a directory"
            )));
        }
        Ok(config)
    }
}

/// Variables of the environment that are probably mistyped options, each with the option that was meant. Variables of
/// other programs may begin with `CKPT_` too.
#[must_use]
pub fn mistyped_variables(names: impl Iterator<Item = String>) -> Vec<(String, String)> {
    let known: Vec<_> = SETTINGS.iter().map(Setting::variable).collect();
    let ends = || known.iter().filter_map(|known| known.strip_prefix("CKPT_"));
    let own = ["TEST", "FAULT", "BENCH", "AGENT", "AUTO", "UPDATE", "RUN"];
    let meant = |name: &String| {
        let end = name.strip_prefix("CKPT_")?;
        let is_own = known.contains(name) || own.iter().any(|own| end.starts_with(own));
        let similar = if is_own { None } else { similar(end, ends()) };
        similar.map(|similar| format!("CKPT_{similar}"))
    };
    names.filter_map(|name| meant(&name).map(|meant| (name, meant))).collect()
}

/// The value on the command line.
fn flag(matches: &ArgMatches, setting: &Setting) -> Option<String> {
    if setting.value.is_some() {
        return matches.get_one::<String>(setting.name).cloned();
    }
    Some(matches.get_count(setting.name)).filter(|&count| count > 0).map(|count| count.to_string())
}

/// A configuration file.
#[derive(Debug, Default)]
struct File {
    path: PathBuf,
    table: toml::Table,
}

impl File {
    /// Reads the file. The default one may be missing.
    fn read(named: &Resolved, trust: &Trust) -> Result<Self> {
        let path = PathBuf::from(&named.value);
        let cannot_read = |error: io::Error| bad_input(anyhow!("cannot read {}: {error}", path.display()));
        let text = match trust.open(&path) {
            Ok(file) => io::read_to_string(file).map_err(cannot_read)?,
            Err(OpenError::Io(error))
                if error.kind() == io::ErrorKind::NotFound
                    && named.origin == Origin::Default
                    && !path.is_symlink() =>
            {
                return Ok(Self::default());
            }
            Err(OpenError::Io(error)) => return Err(cannot_read(error)),
            Err(OpenError::Untrusted(why)) => {
                return Err(bad_input(anyhow!("{} is not read: {why}", path.display())));
            }
        };
        let table = text.parse::<toml::Table>();
        let table = table.with_context(|| format!("{} is not valid TOML", path.display()));
        let file = Self { path, table: table.map(without_sections).map_err(bad_input)? };
        file.check().map_err(bad_input)?;
        Ok(file)
    }

    fn check(&self) -> Result<()> {
        let path = self.path.display();
        let is_key = |name: &&str| ![CONFIG_FILE.name, TRUST.name].contains(name);
        let names = || SETTINGS.iter().map(|setting| setting.name).filter(is_key);
        for (key, value) in &self.table {
            if !names().any(|name| name == key) {
                let hint = match similar(key, names()) {
                    Some(similar) => format!("Did you mean {similar:?}?"),
                    None => format!("The options are {}", names().collect::<Vec<_>>().join(", ")),
                };
                return Err(anyhow!("{path}: there is no option {key:?}. {hint}"));
            }
            if !value.is_str() && !value.is_integer() && !is_list(value) {
                return Err(anyhow!(
                    "{path}: {key} must be a string in quotes, a number, or a list of strings"
                ));
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Option<(String, Origin)> {
        let text = match self.table.get(name)? {
            toml::Value::String(text) => text.clone(),
            toml::Value::Array(list) => {
                list.iter().filter_map(toml::Value::as_str).collect::<Vec<_>>().join(",")
            }
            other => other.to_string(),
        };
        Some((text, Origin::File(self.path.clone())))
    }
}

/// Whether a value is a list of strings. An option with several values takes them separated by commas, or as a list.
fn is_list(value: &toml::Value) -> bool {
    value.as_array().is_some_and(|list| list.iter().all(toml::Value::is_str))
}

/// The keys of a section, such as `exclude` in `[files]`, with the names of the options: `files-exclude`. The key `mode`
/// is the option of the section's name.
fn without_sections(table: toml::Table) -> toml::Table {
    let mut flat = toml::Table::new();
    for (key, value) in table {
        match value {
            toml::Value::Table(section) => {
                let option = |name: &str| if name == "mode" { key.clone() } else { format!("{key}-{name}") };
                flat.extend(section.into_iter().map(|(name, value)| (option(&name), value)));
            }
            value => drop(flat.insert(key, value)),
        }
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::settings;
    use crate::files::rules::Coverage;
    use crate::sys::error::BadInput;
    use ckpt_snapshot::codec::Compression;
    use std::io::Write;
    use std::path::Path;
    use std::time::Duration;

    fn resolve(args: &[&str], variables: &[(&str, &str)]) -> Result<Config> {
        let command = clap::Command::new("test").args(settings::args());
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
    fn mistyped_variables_are_found() {
        let names = ["CKPT_INTREVAL", "CKPT_INTERVAL", "CKPT_DIR", "CKPT_PATH", "CKPT_TEST_SEED", "PATH"];
        let found = mistyped_variables(names.into_iter().map(str::to_owned));
        assert_eq!(found, [("CKPT_INTREVAL".to_owned(), "CKPT_INTERVAL".to_owned())]);
    }

    #[test]
    fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
        let file = file("interval = \"30m\"\nkeep = 7\nstore = \"/c\"\n");
        let path = file.path().to_str().unwrap();
        let variables = [("CKPT_INTERVAL", "20m"), ("CKPT_STORE", "/b"), ("CKPT_CONFIG", path)];
        let config = resolve(&["--store", "/a"], &variables).unwrap();
        assert_eq!(config.store.dir, PathBuf::from("/a"));
        assert_eq!(config.interval, Some(Duration::from_secs(1200)));
        assert_eq!(config.keep, 7);
        assert_eq!(config.freeze_timeout, Duration::from_secs(60));
        let origin = |name: &str| config.resolved.iter().find(|one| one.name == name).unwrap().origin.clone();
        assert_eq!(origin("store"), Origin::Flag);
        assert_eq!(origin("interval"), Origin::Variable("CKPT_INTERVAL".into()));
        assert_eq!(origin("keep"), Origin::File(path.into()));
        assert_eq!(origin("network"), Origin::Default);
    }

    /// Whatever the file says, the answer is a configuration or bad input.
    #[test]
    fn any_file_is_used_or_refused() {
        let samples = [
            "interval = \"30m\"\nkeep = 7\nstore = \"/c\"\n[files]\nexclude = [\"*.tmp\", \"/data\"]\nbudget = \"4GiB\"\n",
            "overhead = \"1%\"\nmtbf = \"24h\"\nmetrics = 9400\nupload = \"s3://bucket/team\"\nkeep-every = \"1d\"\n",
            "on-signal = \"TERM\"\nmax-restarts = 3\nfreeze-timeout = \"60s\"\nresume-policy = \"newest\"\n",
        ];
        let (samples, file) = (samples.map(|text| text.as_bytes().to_vec()), file(""));
        let variables = [("CKPT_CONFIG", file.path().to_str().unwrap())];
        ckpt_test_mutate::mutations(&samples, |bytes| {
            std::fs::write(file.path(), bytes).unwrap();
            if let Err(error) = resolve(&[], &variables) {
                assert!(error.is::<BadInput>(), "{error:#}");
            }
        });
    }

    /// A link to a file that is gone, for instance on a mount that is not there, is not a missing file: its options would
    /// not be used, without a word.
    #[test]
    fn the_default_file_may_be_missing_but_not_what_it_links_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ckpt-run.toml");
        let named = |origin| Resolved {
            name: CONFIG_FILE.name,
            value: path.to_str().unwrap().to_owned(),
            origin,
            found: None,
        };
        assert!(File::read(&named(Origin::Default), &Trust::default()).unwrap().table.is_empty());
        assert!(File::read(&named(Origin::Flag), &Trust::default()).unwrap_err().is::<BadInput>());
        std::os::unix::fs::symlink(dir.path().join("gone"), &path).unwrap();
        let error = File::read(&named(Origin::Default), &Trust::default()).unwrap_err();
        assert!(error.is::<BadInput>(), "{error:#}");
        assert!(error.to_string().starts_with(&format!("cannot read {}", path.display())), "{error}");
    }

    #[test]
    fn a_section_has_the_options_of_its_name() {
        let file = file(
            "keep = 7\n[files]\nmode = \"lenient\"\nexclude = [\"*.tmp\", \"/data\"]\nbudget = \"2GiB\"\n",
        );
        let path = file.path().to_str().unwrap();
        let config = resolve(&[], &[("CKPT_CONFIG", path)]).unwrap();
        assert_eq!(config.files.exclude, ["*.tmp", "/data"]);
        assert_eq!((config.files.budget_bytes, config.keep), (2 << 30, 7));
        assert_eq!(config.files.coverage, Coverage::Lenient);
        let unknown = self::file("[files]\nexclud = \"x\"\n");
        let path = unknown.path().to_str().unwrap();
        let message = resolve(&[], &[("CKPT_CONFIG", path)]).unwrap_err().to_string();
        assert!(
            message.contains("files-exclud") && message.contains("Did you mean \"files-exclude\""),
            "{message}"
        );
    }

    #[test]
    fn bad_values_say_which_and_where_from() {
        let message =
            |args: &[&str], variables: &[(&str, &str)]| resolve(args, variables).unwrap_err().to_string();
        assert!(message(&["--keep", "0"], &[]).contains("keep = \"0\" (command line)"));
        assert!(message(&["--persist-every", "0"], &[]).contains("a number from 1"));
        assert!(message(&[], &[("CKPT_INTERVAL", "soon")]).contains("(variable CKPT_INTERVAL)"));
        assert!(message(&["--interval", "0s"], &[]).contains("10m, or off"));
        assert!(message(&["--network", "none"], &[]).contains("host, private or job"));
        assert!(message(&["--job", "../x"], &[]).contains("job's name"));
        assert!(message(&["--on-signal", "KILL"], &[]).contains("TERM, USR1"));
        assert!(message(&["--grace", "0s"], &[]).contains("30s"));
        for bad in ["1", "0%", "90%", "NaN%"] {
            assert!(message(&["--overhead", bad], &[]).contains("at most 50%"), "{bad}");
        }
        assert!(message(&["--max-restarts", "many"], &[]).contains("from 0"));
        assert!(message(&["--config", "/nonexistent.toml"], &[]).contains("/nonexistent.toml"));
        let typo = file("intervall = \"3m\"\n");
        let said = message(&["--config", typo.path().to_str().unwrap()], &[]);
        assert!(said.contains("no option \"intervall\". Did you mean \"interval\"?"), "{said}");
        // A file cannot name another.
        for unknown in ["config = \"x\"\n", "colour = 1\n"] {
            let unknown = file(unknown);
            let said = message(&["--config", unknown.path().to_str().unwrap()], &[]);
            assert!(said.contains("there is no option") && said.contains("store, job, interval"), "{said}");
            assert!(!said.contains("Did you mean") && !said.contains("config,"), "{said}");
        }
    }

    /// Each row of the table sets its field.
    #[test]
    fn defaults_are_those_of_the_table() {
        let config = resolve(&[], &[]).unwrap();
        assert_eq!((config.interval, config.hang_timeout), (Some(Duration::from_secs(600)), None));
        let times = (config.freeze_timeout, config.monitor_interval, config.grace);
        assert_eq!(times, (Duration::from_secs(60), Duration::from_secs(1), Duration::from_secs(30)));
        assert_eq!((config.keep, config.persist_every, config.upload_every), (3, 1, 1));
        assert_eq!((config.max_restarts, config.verbosity), (32767, 0));
        assert_eq!(config.store.dir, Path::new("./.ckpt-run"));
        let names: Vec<_> = config.resolved.iter().map(|one| one.name).collect();
        assert_eq!(names, SETTINGS.iter().map(|setting| setting.name).collect::<Vec<_>>());
    }

    #[test]
    fn a_store_is_a_directory_or_an_address() {
        let config = resolve(&["--store", "s3://bucket/team/"], &[]).unwrap();
        assert_eq!(config.store.url.unwrap().to_string(), "s3://bucket/team");
        let other = resolve(&["--store", "s3://bucket/other"], &[]).unwrap();
        assert_ne!(config.store.dir, other.store.dir, "each address has a place of its own");
        assert!(config.store.dir.ends_with(Path::new("stores").join(config.store.dir.file_name().unwrap())));
        assert_eq!(resolve(&["--store", "a/b"], &[]).unwrap().store.dir, Path::new("a/b"));
        let message = |args: &[&str]| resolve(args, &[]).unwrap_err().to_string();
        assert!(message(&["--store", "s3://"]).contains("store (command line): "));
        assert!(message(&["--store", "s3://b/x", "--upload", "s3://b/y"]).contains("leave --upload out"));
    }

    #[test]
    fn compressions_and_limits_are_read() {
        let config = resolve(&["--compress", "zstd:7", "--upload-limit", "1MB/s"], &[]).unwrap();
        assert_eq!(config.store.compression, Compression::Zstd { level: 7 });
        assert_eq!(config.store.upload_limit_bytes_per_s, Some(1_000_000));
        let pace = config.store.pace();
        assert_eq!((pace.limit(), pace.pauses()), (Some(1_000_000), None));
        let pace = resolve(&["--upload-pause-above", "1GB/s"], &[]).unwrap().store.pace();
        let above = pace.pauses().map(|policy| policy.above_bytes_per_s);
        assert_eq!((pace.limit(), above), (None, Some(1_000_000_000)));
        assert_eq!(resolve(&[], &[]).unwrap().store.compression, Compression::None);
        let refused = resolve(&["--compress", "zstd:99"], &[]).unwrap_err().to_string();
        assert!(refused.contains("compress = \"zstd:99\""), "{refused}");
    }

    #[test]
    fn auto_is_shown_with_its_outcome() {
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
    fn metrics_stay_on_this_machine_unless_an_address_is_given() {
        let address = |text: &str| resolve(&["--metrics", text], &[]).unwrap().metrics.unwrap().to_string();
        for local in ["9400", ":9400", "localhost:9400", "127.0.0.1:9400"] {
            assert_eq!(address(local), "127.0.0.1:9400", "{local}");
        }
        assert_eq!(address("0.0.0.0:9400"), "0.0.0.0:9400");
        assert_eq!(address("[::1]:0"), "[::1]:0");
        assert_eq!(resolve(&[], &[]).unwrap().metrics, None);
        for bad in ["on", "70000", "127.0.0.1", "localhost", "http://127.0.0.1:1", "-1"] {
            let error = resolve(&[&format!("--metrics={bad}")], &[]).unwrap_err().to_string();
            assert!(error.contains("metrics = ") && error.contains("IP:PORT"), "{bad}: {error}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let probe = "curl -H 'Authorization: Bearer hunter2' https://me:hunter2@host/";
        let config = resolve(&["--preempt-probe", probe], &[]).unwrap();
        assert_eq!(config.preempt_probe.as_deref(), Some(probe), "the command itself is unchanged");
        assert!(!format!("{:?}", config.resolved).contains("hunter2"), "{:?}", config.resolved);
        let error = resolve(&["--upload", "s3://me:hunter2@bucket/x"], &[]).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && error.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
        let error = resolve(&["--metrics", "http://me:hunter2@host/"], &[]).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && error.contains("IP:PORT"), "{error}");
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(resolve(&[], &[]).unwrap().on_signal, [libc::SIGTERM, libc::SIGHUP, libc::SIGINT]);
        let two = resolve(&["--on-signal", "SIGUSR1, INT"], &[]).unwrap().on_signal;
        assert_eq!(two, [libc::SIGUSR1, libc::SIGINT]);
        assert_eq!(resolve(&["--on-signal", "off"], &[]).unwrap().on_signal, [0; 0]);
    }

    #[test]
    fn off_and_counts() {
        let config = resolve(&["--interval", "off", "-vv", "-q"], &[]).unwrap();
        assert_eq!(config.interval, None);
        assert_eq!(config.verbosity, 1);
        assert_eq!(resolve(&[], &[("CKPT_QUIET", "2")]).unwrap().verbosity, -2);
    }
}
