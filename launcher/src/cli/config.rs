//! The options: one table from which the flags, the `CKPT_*` variables, the keys of `ckpt-run.toml`, their help and
//! `ckpt-run config` are made.

use crate::cli::logging::Format;
use crate::gpu::preload::Interposer;
use crate::job::resume_point::Resume;
use crate::namespace::Network;
use crate::store::options::StoreOptions;
use crate::sys::error::bad_input;
use crate::sys::runtime_dir;
use crate::sys::secrets;
use anyhow::{Context, Result, anyhow};
use ckpt_object_medium::StoreUrl;
use ckpt_snapshot::codec::{Compression, Key};
use ckpt_snapshot::{JobKey, KeepEvery, Retention};
use clap::{Arg, ArgAction, ArgMatches};
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddr};
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
        value: Some("DIR|URL"),
        default: "./.ckpt-run",
        help: "Where snapshots are kept: a directory, or an address as of --upload",
        long_help: "Where snapshots are kept. A snapshot is the memory of your job, secrets included: the directory is made so that only you can read it. Put it on a disk that survives what the job shall survive. With an address (`s3://BUCKET/PREFIX`, `gs://…`, `az://…`, `file:///…`; see --upload) snapshots go to that object store and nowhere else; locks, logs and the journal are in `$XDG_STATE_HOME/ckpt-run/stores` then (default: `~/.local/state/ckpt-run/stores`).",
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
        name: "overhead",
        short: None,
        value: Some("SHARE"),
        default: "",
        help: "Choose the interval so that snapshots halt the job for at most this share of the time",
        long_help: "Choose the interval so that the job stands still for snapshots for at most this share of the time (`1%`), by what the last ones have cost. The first one comes after --interval, or after a minute if that is sooner.",
    },
    Setting {
        name: "mtbf",
        short: None,
        value: Some("TIME"),
        default: "",
        help: "Choose the interval that loses least if the job fails this often on average",
        long_help: "Choose the interval that loses least to snapshots and failures together, for this mean time between failures (`24h`; of the whole job, all its machines together) and what the last snapshots have cost. With --overhead, the longer interval of the two.",
    },
    Setting {
        name: "persist-every",
        short: None,
        value: Some("N"),
        default: "1",
        help: "Keep snapshots in memory, and bring each N-th to the store",
        long_help: "Keep snapshots in ckpt-run's own memory, and bring the first and then each N-th to the store, beside the running job; 1 brings each straight to the store. A job that dies is restarted from memory. What is in memory outlives the job, but neither ckpt-run nor the machine: the newest is copied to the store before ckpt-run ends, unless that is killed. The last snapshot of a job that is preempted or stopped, and one that is asked for, go straight to the store; so does one for which there is no room. At most two stay in memory, and one that is being copied.",
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
        name: "keep-every",
        short: None,
        value: Some("N|TIME"),
        default: "",
        help: "Also keep one snapshot of each so many, or of each such time",
        long_help: "Also keep the first snapshot of each so many (`100`), or of each such stretch of time (`6h`), for ever. Snapshots that have a tag or are pinned stay in any case.",
    },
    Setting {
        name: "compress",
        short: None,
        value: Some("HOW"),
        default: "off",
        help: "off, auto, zstd, or zstd:LEVEL",
        long_help: "How chunks of snapshots are compressed:\n  off         not at all: the fastest where the disk is fast\n  auto        each chunk in the way that makes a sample of it smallest, if any does\n  zstd:LEVEL  by Zstandard at this level, from 1 to 19; zstd alone is zstd:3\nWhat is in the store already is read however it was compressed.",
    },
    Setting {
        name: "encrypt-key-file",
        short: None,
        value: Some("FILE"),
        default: "",
        help: "Encrypt snapshots with the key in this file",
        long_help: "Encrypt snapshots with the key in this file: 32 bytes, or 64 hexadecimal digits. The key is not in the store: without it nobody can read the snapshots, you included. All runs and commands of a job need the same key.",
    },
    Setting {
        name: "upload",
        short: None,
        value: Some("URL"),
        default: "",
        help: "Also copy snapshots to an object store: s3://BUCKET/PREFIX, gs://, az://, file:///",
        long_help: "Also copy snapshots to an object store (`s3://BUCKET/PREFIX`, `gs://…`, `az://…`, `file:///…`), while the job runs and after they are safe on disk. Credentials come from the variables that the service's own tools use. A resume takes what is on disk; what is not there it takes from here.",
    },
    Setting {
        name: "upload-every",
        short: None,
        value: Some("K"),
        default: "1",
        help: "Upload each K-th snapshot",
        long_help: "Upload each K-th snapshot. One that comes while another is being uploaded waits; only the newest of those that wait is uploaded.",
    },
    Setting {
        name: "upload-limit",
        short: None,
        value: Some("RATE"),
        default: "",
        help: "Upload no faster than this, such as 200MiB/s",
        long_help: "Upload no faster than this many bytes per second (`200MiB/s`, `1GB/s`). A directory (`file:///…`) is written to at full speed.",
    },
    Setting {
        name: "upload-pause-above",
        short: None,
        value: Some("RATE"),
        default: "",
        help: "Pause uploads while the job sends more than this, such as 1GB/s",
        long_help: "Pause uploads while this machine sends more than this many bytes per second beside them, on its busiest interface other than the loopback. They go on when it sends less than three quarters of that, and a part goes out every 30 s in any case. What goes past the interfaces' counters (RDMA) is not seen. Not for a directory (`file:///…`), nor for the last snapshot of a job that is ended.",
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
        name: "max-restarts",
        short: None,
        value: Some("N"),
        default: "32767",
        help: "Restart a job that fails at most this often; 0 is never",
        long_help: "Restart a job that fails (ends with another exit code than 0, or is killed) from its newest snapshot, or from the beginning if there is none, at most this often; 0 is never. After each failure the wait is longer, up to 5 minutes, until there is a new snapshot. A job that fails 3 times from the same snapshot is tried from an older one, at most twice, and is then given up; so is a command that fails in its first 5 s. A job that its user interrupts (Ctrl-C) is not restarted.",
    },
    Setting {
        name: "monitor-interval",
        short: None,
        value: Some("TIME"),
        default: "1s",
        help: "Look this often at what nobody tells of",
        long_help: "Look this often at what nobody tells ckpt-run of: whether --preempt-file is there, and whether the job makes progress (--hang-timeout). It is also the pause between two calls of --preempt-probe.",
    },
    Setting {
        name: "hang-timeout",
        short: None,
        value: Some("TIME"),
        default: "off",
        help: "Restart a job that does nothing for so long, or `off`",
        long_help: "Restart a job in which no process has used more than a hundredth of a CPU or submitted anything to a GPU for so long, or in which one has been stopped (SIGSTOP) for so long; or `off`. The CPU time of a process that waits for its GPU does not count. What its threads were doing is kept in the store first, with Python's stacks where py-spy is on the PATH. Choose it longer than the longest time for which the job only waits: for kernels on the GPU, for a slow disk.",
    },
    Setting {
        name: "on-signal",
        short: None,
        value: Some("SIGNAL"),
        default: "TERM",
        help: "This signal preempts: a snapshot, and the end with exit code 75; or `off`",
        long_help: "When ckpt-run gets this signal (TERM, USR1, USR2, HUP, INT, QUIT or XCPU), it takes a snapshot with which the job ends, and ends with exit code 75, which tells schedulers to queue it again. A second signal ends everything at once. `off` passes SIGTERM on to the job, as the others are.",
    },
    Setting {
        name: "preempt-file",
        short: None,
        value: Some("PATH"),
        default: "",
        help: "Preempt the job when this file appears",
        long_help: "Preempt the job, as --on-signal does, when this file appears or is made anew. One that is there when ckpt-run starts is an old one.",
    },
    Setting {
        name: "preempt-probe",
        short: None,
        value: Some("CMD"),
        default: "",
        help: "Preempt the job when this shell command ends with 0",
        long_help: "Preempt the job, as --on-signal does, when this shell command ends with 0. It runs beside the job, outside of it, and is called again when it ends otherwise: it may wait for the event, or look and end.",
    },
    Setting {
        name: "grace",
        short: None,
        value: Some("TIME"),
        default: "30s",
        help: "A preempted job has to be saved and gone within this time",
        long_help: "A preempted job has to be saved and gone within this time, counted from the signal. If the snapshot is not durable by then, the job ends without it, and the newest one there is counts. Set it a little shorter than what the scheduler grants.",
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
        name: "log-format",
        short: None,
        value: Some("FORMAT"),
        default: "text",
        help: "Write ckpt-run's own messages as text or json",
        long_help: "Write ckpt-run's own messages as `text`, or as `json`: one object per line with timestamp, level, target and fields.message, on stderr and in --log-file.",
    },
    Setting {
        name: "metrics",
        short: None,
        value: Some("ADDR"),
        default: "",
        help: "Serve metrics for Prometheus at this port of this machine, or at IP:PORT",
        long_help: "Serve metrics for Prometheus at `http://ADDR/metrics` while the job runs. A port alone (`9400`) can be reached from this machine only; `IP:PORT` is taken as it is (`0.0.0.0:9400`: by anybody who reaches this machine). Port 0 is one that is free, and is told.",
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

impl Resolved {
    /// Without what may be a secret in it.
    fn to_show(&self) -> Self {
        Self { value: secrets::hidden_in_text(&self.value), ..self.clone() }
    }
}

/// The effective options.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where snapshots are stored, and how.
    pub store: StoreOptions,
    /// The job's name, if it was given one.
    pub job: Option<JobKey>,
    /// Time between snapshots; `None` is off.
    pub interval: Option<Duration>,
    /// The largest share of the time that the job may stand still for snapshots.
    pub overhead: Option<f64>,
    /// Mean time between failures of the job.
    pub mtbf: Option<Duration>,
    /// Each so many snapshots go to the store; the others stay in memory.
    pub persist_every: u64,
    /// Snapshots to keep.
    pub keep: usize,
    /// Snapshots to keep besides, for ever.
    pub keep_every: Option<KeepEvery>,
    /// Each so many of them.
    pub upload_every: u64,
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
    /// How often a job that fails is restarted.
    pub max_restarts: u32,
    /// How often to look at what nobody tells of.
    pub monitor_interval: Duration,
    /// A job that does nothing for so long hangs; `None` is off.
    pub hang_timeout: Option<Duration>,
    /// The signal that preempts, if one does.
    pub on_signal: Option<i32>,
    /// The file whose appearance preempts.
    pub preempt_file: Option<PathBuf>,
    /// The shell command whose success preempts.
    pub preempt_probe: Option<String>,
    /// In this time a preempted job has to be saved and gone.
    pub grace: Duration,
    /// Where messages also go.
    pub log_file: Option<PathBuf>,
    /// How messages are written.
    pub log_format: Format,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
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

    /// Which snapshots stay.
    #[must_use]
    pub fn retention(&self) -> Retention {
        Retention { keep: self.keep, every: self.keep_every }
    }

    fn parse(mut resolved: Vec<Resolved>) -> Result<Self> {
        let interpose =
            resolved.iter_mut().find(|one| one.name == "interpose").expect("every setting is resolved");
        let wanted = "auto, off or the path of libckpt_interpose.so";
        let interposer = typed(interpose, wanted, Interposer::parse)?;
        interpose.found = (interpose.value == "auto").then(|| interposer.to_string());
        let store = resolved.iter_mut().find(|one| one.name == "store").expect("every setting is resolved");
        let (dir, store_url) = place(store)?;
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
        let upload = url(find("upload"))?;
        if let (Some(store), Some(_)) = (&store_url, &upload) {
            let problem = anyhow!(
                "--upload copies snapshots from a store on disk, and {store} is none: leave --upload out, or give --store a directory"
            );
            return Err(bad_input(problem));
        }
        Ok(Self {
            store: StoreOptions {
                dir,
                url: store_url,
                compression: typed(
                    find("compress"),
                    "off, auto, zstd, or zstd:LEVEL with a level from 1 to 19",
                    |text| {
                        if text == "off" { Some(Compression::None) } else { text.parse().ok() }
                    },
                )?,
                key: key(find("encrypt-key-file"))?,
                upload,
                upload_limit_bytes_per_s: optional(find("upload-limit"), "a rate such as 200MiB/s", rate)?,
                upload_pause_above_bytes_per_s: optional(
                    find("upload-pause-above"),
                    "a rate such as 1GB/s",
                    rate,
                )?,
            },
            job,
            interval: typed(find("interval"), "a time such as 10m, or off", duration_or_off)?,
            overhead: typed(find("overhead"), "a share such as 1%, more than 0% and at most 50%", share)?,
            mtbf: typed(find("mtbf"), "a time such as 24h", |text| match text {
                "" => Some(None),
                text => duration(text).map(Some),
            })?,
            persist_every: typed(find("persist-every"), "a number from 1", |text| {
                text.parse().ok().filter(|&every| every > 0)
            })?,
            keep: typed(find("keep"), "a number from 1", |text| text.parse().ok().filter(|&keep| keep > 0))?,
            keep_every: optional(find("keep-every"), "a number from 1, or a time such as 6h", |text| {
                text.parse().ok()
            })?,
            upload_every: typed(find("upload-every"), "a number from 1", |text| {
                text.parse().ok().filter(|&every| every > 0)
            })?,
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
            max_restarts: typed(find("max-restarts"), "a number from 0", |text| text.parse().ok())?,
            monitor_interval: typed(find("monitor-interval"), "a time such as 1s", duration)?,
            hang_timeout: typed(find("hang-timeout"), "a time such as 10m, or off", duration_or_off)?,
            on_signal: typed(find("on-signal"), SIGNAL_WANTED, |text| match text {
                "off" => Some(None),
                name => preempting_signal(name).map(Some),
            })?,
            preempt_file: optional_path("preempt-file"),
            preempt_probe: Some(find("preempt-probe").value.clone()).filter(|command| !command.is_empty()),
            grace: typed(find("grace"), "a time such as 30s", duration)?,
            log_file: optional_path("log-file"),
            log_format: typed(find("log-format"), "text or json", |text| match text {
                "text" => Some(Format::Text),
                "json" => Some(Format::Json),
                _ => None,
            })?,
            metrics: optional(find("metrics"), "a port such as 9400, or IP:PORT", listen_address)?,
            verbosity: count("verbose")? - count("quiet")?,
            resolved: resolved.iter().map(Resolved::to_show).collect(),
        })
    }
}

const SIGNAL_WANTED: &str = "TERM, USR1, USR2, HUP, INT, QUIT, XCPU, or off";

/// The signals that a scheduler may send, with and without SIG before them.
fn preempting_signal(name: &str) -> Option<i32> {
    let signals = [
        ("TERM", libc::SIGTERM),
        ("USR1", libc::SIGUSR1),
        ("USR2", libc::SIGUSR2),
        ("HUP", libc::SIGHUP),
        ("INT", libc::SIGINT),
        ("QUIT", libc::SIGQUIT),
        ("XCPU", libc::SIGXCPU),
    ];
    let name = name.strip_prefix("SIG").unwrap_or(name);
    signals.iter().find(|signal| signal.0 == name).map(|signal| signal.1)
}

fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok().filter(|duration| !duration.is_zero())
}

/// A percentage as a share of 1; nothing is none.
fn share(text: &str) -> Option<Option<f64>> {
    if text.is_empty() {
        return Some(None);
    }
    let share = text.strip_suffix('%')?.trim().parse::<f64>().ok()? / 100.0;
    (share > 0.0 && share <= 0.5).then_some(Some(share))
}

fn duration_or_off(text: &str) -> Option<Option<Duration>> {
    match text {
        "off" => Some(None),
        text => duration(text).map(Some),
    }
}

fn typed<T>(resolved: &Resolved, wanted: &str, parse: impl FnOnce(&str) -> Option<T>) -> Result<T> {
    parse(&resolved.value).ok_or_else(|| {
        let Resolved { name, value, origin, .. } = resolved.to_show();
        bad_input(anyhow!("{name} = {value:?} ({origin}): this has to be {wanted}"))
    })
}

/// The directory that the store's place comes to, and its address if it has one.
fn place(store: &mut Resolved) -> Result<(PathBuf, Option<StoreUrl>)> {
    if !StoreUrl::is_meant(&store.value) {
        let wanted = "a directory, or an address such as s3://BUCKET/PREFIX";
        let dir = typed(store, wanted, |text| (!text.is_empty()).then(|| PathBuf::from(text)))?;
        return Ok((dir, None));
    }
    let url = url(store)?;
    let name = runtime_dir::short_name(Path::new(&url.as_ref().map(ToString::to_string).unwrap_or_default()));
    let state = runtime_dir::state_dir()
        .context("there is no place on this machine for locks and logs")
        .map_err(|error| bad_input(error.context("set XDG_STATE_HOME to a directory")))?;
    let dir = state.join("stores").join(name);
    store.found = Some(format!("on this machine: {}", dir.display()));
    Ok((dir, url))
}

fn url(resolved: &Resolved) -> Result<Option<StoreUrl>> {
    if resolved.value.is_empty() {
        return Ok(None);
    }
    let wrong = |error| bad_input(anyhow!("{} ({}): {error}", resolved.name, resolved.origin));
    resolved.value.parse::<StoreUrl>().map(Some).map_err(wrong)
}

fn key(resolved: &Resolved) -> Result<Option<Key>> {
    if resolved.value.is_empty() {
        return Ok(None);
    }
    Key::from_file(Path::new(&resolved.value)).map(Some).map_err(bad_input)
}

/// A port, on the loopback interface unless an address is given.
fn listen_address(text: &str) -> Option<SocketAddr> {
    let port = text.strip_prefix("localhost").unwrap_or(text);
    match port.strip_prefix(':').unwrap_or(port).parse() {
        Ok(port) => Some((Ipv4Addr::LOCALHOST, port).into()),
        Err(_) => text.parse().ok(),
    }
}

/// Bytes per second: `200MiB/s`.
fn rate(text: &str) -> Option<u64> {
    let amount = text.strip_suffix("/s").unwrap_or(text).trim();
    let digits = amount.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(amount.len());
    let (number, unit) = amount.split_at(digits);
    let unit: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit).filter(|&rate| rate > 0)
}

/// An option that is empty where nothing is wanted.
fn optional<T>(
    resolved: &Resolved,
    wanted: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>> {
    if resolved.value.is_empty() { Ok(None) } else { typed(resolved, wanted, parse).map(Some) }
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

    #[test]
    fn bad_values_say_which_and_where_from() {
        let message =
            |args: &[&str], variables: &[(&str, &str)]| resolve(args, variables).unwrap_err().to_string();
        assert!(message(&["--keep", "0"], &[]).contains("keep = \"0\" (command line)"));
        assert!(message(&["--persist-every", "0"], &[]).contains("a number from 1"));
        assert!(message(&[], &[("CKPT_INTERVAL", "soon")]).contains("(variable CKPT_INTERVAL)"));
        assert!(message(&["--interval", "0s"], &[]).contains("10m, or off"));
        assert!(message(&["--network", "none"], &[]).contains("host or private"));
        assert!(message(&["--job", "../x"], &[]).contains("job's name"));
        assert!(message(&["--on-signal", "KILL"], &[]).contains("TERM, USR1"));
        assert!(message(&["--grace", "0s"], &[]).contains("30s"));
        for bad in ["1", "0%", "90%", "NaN%"] {
            assert!(message(&["--overhead", bad], &[]).contains("at most 50%"), "{bad}");
        }
        assert!(message(&["--max-restarts", "many"], &[]).contains("from 0"));
        assert!(message(&["--config", "/nonexistent.toml"], &[]).contains("/nonexistent.toml"));
        let typo = file("intervall = \"3m\"\n");
        assert!(
            message(&["--config", typo.path().to_str().unwrap()], &[]).contains("no option \"intervall\"")
        );
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
    fn rates_and_compressions_are_read() {
        assert_eq!(rate("200MiB/s"), Some(200 << 20));
        assert_eq!((rate("5 kB"), rate("7")), (Some(5000), Some(7)));
        for bad in ["", "fast", "0", "-1MB", "1.5GB", "99999999999GiB/s"] {
            assert_eq!(rate(bad), None, "{bad:?}");
        }
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
        assert_eq!(config.preempt_probe.as_deref(), Some(probe), "it is called as it is");
        assert!(!format!("{:?}", config.resolved).contains("hunter2"), "{:?}", config.resolved);
        let error = resolve(&["--upload", "s3://me:hunter2@bucket/x"], &[]).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && error.contains("AWS_SECRET_ACCESS_KEY"), "{error}");
        let error = resolve(&["--metrics", "http://me:hunter2@host/"], &[]).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && error.contains("IP:PORT"), "{error}");
    }

    #[test]
    fn signals_have_names() {
        assert_eq!(resolve(&[], &[]).unwrap().on_signal, Some(libc::SIGTERM));
        assert_eq!(resolve(&["--on-signal", "SIGUSR1"], &[]).unwrap().on_signal, Some(libc::SIGUSR1));
        assert_eq!(resolve(&["--on-signal", "off"], &[]).unwrap().on_signal, None);
    }

    #[test]
    fn off_and_counts() {
        let config = resolve(&["--interval", "off", "-vv", "-q"], &[]).unwrap();
        assert_eq!(config.interval, None);
        assert_eq!(config.verbosity, 1);
        assert_eq!(resolve(&[], &[("CKPT_QUIET", "2")]).unwrap().verbosity, -2);
    }
}
