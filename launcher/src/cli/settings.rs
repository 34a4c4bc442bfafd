//! The table of options. The flags, the `CKPT_*` variables, the keys of `ckpt-run.toml`, their help, `ckpt-run config`
//! and the table in docs/options.md are made from it. A new option is one row here and one field of [`Config`].

use crate::checkpoint::precopy::Precopy;
use crate::cli::config::Config;
use crate::cli::values::{
    Origin, Resolved, count, duration, hang_timeout, listen_address, named, optional, or_off, parsed,
    positive, preempting_signals, rate, share, size,
};
use crate::cluster::{ClusterKey, Coordinator};
use crate::files::rules::FileRules;
use crate::gpu::placement::GpuMap;
use crate::gpu::preload::{self, Interposer};
use crate::job::resume_point::Resume;
use crate::observe::notify::Address;
use crate::sys::deadline::SHORTEST_NODE_TIMEOUT;
use crate::sys::error::bad_input;
use crate::sys::trust::{Trust, Untrusted};
use anyhow::{Result, anyhow};
use ckpt_snapshot::JobKey;
use ckpt_snapshot::codec::{Compression, Key};
use clap::{Arg, ArgAction};
use ipnet::Ipv4Net;
use std::path::{Path, PathBuf};

/// One option.
pub struct Setting {
    /// Flag and key; the variable is `CKPT_` and the name in capitals.
    pub name: &'static str,
    /// What the value is called in the help; `None` for a flag that is counted.
    pub value: Option<&'static str>,
    /// The value when none is given.
    pub default: &'static str,
    help: &'static str,
    long_help: &'static str,
    /// Parses the value and puts it into the configuration.
    pub set: fn(&mut Config, &mut Resolved) -> Result<()>,
}

/// The file with options. It is read before the other options, and is no key of the file itself.
pub const CONFIG_FILE: Setting = Setting {
    name: "config",
    value: Some("FILE"),
    default: "ckpt-run.toml",
    help: "Read options from this file; the default file may be missing",
    long_help: "Read options from this file: one `name = value` per line, with the names of the flags. ckpt-run looks for the default file in the working directory; it may be missing. A flag takes precedence over a variable, and a variable over the file.",
    set: |_, _| Ok(()),
};

/// Which directories of other users are trusted. It is no key of the file either: that may be another user's.
pub const TRUST: Setting = Setting {
    name: "trust",
    value: Some("DIR,…"),
    default: "",
    help: "Use configuration, stores and programs in these directories, whoever owns them",
    long_help: "A configuration names programs to execute, and a store contains processes to resume. So ckpt-run refuses those that belong to another user than you and root, that other users may write to, or that lie in such a directory. This option allows it below these absolute directories, separated by commas: volumes of containers, for example. It is no key of the configuration file.",
    set: |config, option| {
        option.put(
            &mut config.store.trust,
            "absolute paths of directories, separated by commas",
            Trust::parse,
        )
    },
};

/// Checks that nobody else decides what is at a path that is executed or written to.
fn check_trust(
    path: Option<&Path>,
    option: &Resolved,
    check: impl Fn(&Path) -> Result<(), Untrusted>,
) -> Result<()> {
    let refused =
        |why| anyhow!("{} = {:?} ({}) is not used: {why}", option.name, option.value, option.origin);
    path.map_or(Ok(()), check).map_err(|why| bad_input(refused(why)))
}

/// Programs that execute the first of their arguments that is neither an option nor a setting.
const RUNNERS: [&str; 17] = [
    ".", "bash", "command", "dash", "env", "exec", "nice", "nohup", "perl", "python", "python3", "setsid",
    "sh", "source", "sudo", "time", "timeout",
];
/// Words of a shell before a command.
const KEYWORDS: [&str; 8] = ["!", "{", "do", "else", "if", "then", "until", "while"];

/// The files that a shell command executes and names by their paths: programs, and scripts of interpreters. Files that a
/// program reads may be anybody's. What is put together from variables, or in a text for another shell, is not found.
fn programs_of(command: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for part in command.split([';', '&', '|', '(', ')', '`', '\n']) {
        for word in shlex::split(part).unwrap_or_default() {
            let is_setting =
                word.starts_with('-') || word.split('/').next().is_some_and(|name| name.contains('='));
            let is_number = word.trim_end_matches(char::is_alphabetic).parse::<f64>().is_ok();
            if KEYWORDS.contains(&&*word) || is_setting || is_number {
                continue;
            }
            let path = PathBuf::from(&word);
            let is_runner = path.file_name().is_some_and(|name| RUNNERS.iter().any(|runner| *runner == name))
                || word == ".";
            if word.contains('/') && path.is_file() {
                found.push(path);
            }
            if !is_runner {
                break;
            }
        }
    }
    found
}

/// The flags that have a short form.
const SHORT: &[(&str, char)] = &[
    ("store", 's'),
    ("job", 'j'),
    ("interval", 'i'),
    ("keep", 'k'),
    ("resume", 'r'),
    ("verbose", 'v'),
    ("quiet", 'q'),
];

/// All options, in the order of the help.
pub const SETTINGS: &[Setting] = &[
    Setting {
        name: "store",
        value: Some("DIR|URL"),
        default: "./.ckpt-run",
        help: "Store snapshots here: a directory, or the URL of an object store (see --upload)",
        long_help: "The store for snapshots. A snapshot contains the memory of your job, including secrets: the directory is created with access for you only. Put it on a disk that outlives the failures you want to survive. With a URL (`s3://BUCKET/PREFIX`, `gs://…`, `az://…`, `file:///…`; see --upload), snapshots are stored in that object store only. Locks, logs and the journal are then in `$XDG_STATE_HOME/ckpt-run/stores` (default: `~/.local/state/ckpt-run/stores`).",
        set: |config, option| {
            (config.store.dir, config.store.url) = option.store()?;
            Ok(())
        },
    },
    Setting {
        name: "job",
        value: Some("NAME"),
        default: "",
        help: "The name of the job [default: derived from its command line and directory]",
        long_help: "The name of the job in the store. Without a name, the same command line in the same working directory is the same job. With a name, only the name counts: a changed command line still resumes.",
        set: |config, option| {
            let name = Some(option.value.as_str()).filter(|name| !name.is_empty());
            // A variable of a script that is not set: another job would begin without a word.
            if name.is_none() && option.origin == Origin::Flag {
                return Err(bad_input(anyhow!(
                    "the name of a job is empty; leave --job out for the default"
                )));
            }
            config.job = name.map(JobKey::named).transpose().map_err(bad_input)?;
            Ok(())
        },
    },
    Setting {
        name: "interval",
        value: Some("TIME"),
        default: "10m",
        help: "Time between snapshots, or `off`",
        long_help: "Time between snapshots (`90s`, `10m`, `1h 30m`). The first one is taken after a minute at most. With `off`, only `ckpt-run checkpoint` takes snapshots.",
        set: |config, option| {
            option.put(&mut config.interval, "a time such as 10m, or off", or_off(duration))
        },
    },
    Setting {
        name: "overhead",
        value: Some("SHARE"),
        default: "",
        help: "Choose the interval so that snapshots pause the job for at most this share of the time",
        long_help: "Choose the interval so that snapshots pause the job for at most this share of the time (`1%`), based on the cost of the last snapshots. The first snapshot is taken after --interval, or after a minute if that is sooner.",
        set: |config, option| {
            option.put(
                &mut config.overhead,
                "a share such as 1%, more than 0% and at most 50%",
                optional(share),
            )
        },
    },
    Setting {
        name: "mtbf",
        value: Some("TIME"),
        default: "",
        help: "Choose the best interval for this mean time between failures",
        long_help: "Choose the interval that minimizes the time lost to snapshots and failures together. The value is the mean time between failures of the whole job, on all its machines together (`24h`). The cost of the last snapshots is taken into account. With --overhead, the longer of the two intervals is used.",
        set: |config, option| option.put(&mut config.mtbf, "a time such as 24h", optional(duration)),
    },
    Setting {
        name: "persist-every",
        value: Some("N"),
        default: "1",
        help: "Keep snapshots in memory, and store every Nth",
        long_help: "Keep snapshots in the memory of ckpt-run, and copy the first and then every Nth to the store while the job runs; 1 stores each snapshot directly. A job that dies is restarted from memory. Snapshots in memory outlive the job, but not ckpt-run or the machine: the newest is copied to the store before ckpt-run exits, unless ckpt-run is killed. These snapshots are stored directly: the final one of a job that is preempted or stopped, one taken by `ckpt-run checkpoint`, and one that does not fit into memory. At most two snapshots stay in memory, plus one that is being copied.",
        set: |config, option| option.put(&mut config.persist_every, "a number from 1", positive),
    },
    Setting {
        name: "keep",
        value: Some("N"),
        default: "3",
        help: "Keep this many snapshots of a job",
        long_help: "Keep this many snapshots of a job. Older ones are deleted only after a newer one is stored; the last good one is never deleted, nor the last one before a process of the job failed. With an interval of less than a minute, one that is a minute older than the newest stays as well, unless this is 1.",
        set: |config, option| option.put(&mut config.keep, "a number from 1", positive),
    },
    Setting {
        name: "keep-every",
        value: Some("N|TIME"),
        default: "",
        help: "Also keep every Nth snapshot, or one per period",
        long_help: "Also keep the first of every N snapshots (`100`), or the first of each period (`6h`), without limit. Snapshots that are tagged or pinned are always kept.",
        set: |config, option| {
            option.put(&mut config.keep_every, "a number from 1, or a time such as 6h", optional(parsed))
        },
    },
    Setting {
        name: "compress",
        value: Some("METHOD"),
        default: "off",
        help: "Compress snapshots: off, auto, zstd, or zstd:LEVEL",
        long_help: "How chunks of snapshots are compressed:\n  off         not at all: the fastest where the disk is fast\n  auto        for each chunk, the method that compresses a sample of it best, if any does\n  zstd:LEVEL  Zstandard at this level, from 1 to 19; zstd alone is zstd:3\nExisting snapshots can be read regardless of this option.",
        set: |config, option| {
            let expected = "off, auto, zstd, or zstd:LEVEL with a level from 1 to 19";
            let compression = option.parse(expected, or_off(parsed))?;
            config.store.compression = compression.unwrap_or(Compression::None);
            Ok(())
        },
    },
    Setting {
        name: "encrypt-key-file",
        value: Some("FILE"),
        default: "",
        help: "Encrypt snapshots with the key in this file",
        long_help: "Encrypt snapshots with the key in this file: 32 bytes, or 64 hexadecimal digits. The key is not in the store: without the key, nobody can read the snapshots, including you. All runs and commands of a job need the same key.",
        set: |config, option| {
            let path = option.path();
            check_trust(path.as_deref(), option, |path| config.store.trust.check(path))?;
            config.store.key = path.map(|path| Key::from_file(&path)).transpose().map_err(bad_input)?;
            Ok(())
        },
    },
    Setting {
        name: "staging",
        value: Some("PLACE"),
        default: "auto",
        help: "Where the job's memory is copied first: auto, memory, or any",
        long_help: "Where the job's memory is copied before it goes to the store, and after it was read from there:\n  any     memory; if that is short or the rights are missing, the store's disk, not encrypted\n  memory  memory only. Otherwise a checkpoint or resume fails, and says so\n  auto    as memory with --encrypt-key-file, as any without\nMemory may be swapped out: use encrypted swap, or none.",
        set: |config, option| option.put(&mut config.store.staging, "auto, memory, or any", named),
    },
    Setting {
        name: "upload",
        value: Some("URL"),
        default: "",
        help: "Also upload snapshots to an object store: s3://BUCKET/PREFIX, gs://, az://, file:///",
        long_help: "Also upload snapshots to an object store (`s3://BUCKET/PREFIX`, `gs://…`, `az://…`, `file:///…`) while the job runs, after they are stored on disk. Credentials come from the variables that the service's own tools use. A resume reads from disk, and from the object store what is missing on disk.",
        set: |config, option| {
            config.store.upload = option.url()?;
            Ok(())
        },
    },
    Setting {
        name: "upload-every",
        value: Some("N"),
        default: "1",
        help: "Upload every Nth snapshot",
        long_help: "Upload every Nth snapshot. A snapshot that is taken during an upload waits; only the newest of the waiting snapshots is uploaded.",
        set: |config, option| option.put(&mut config.upload_every, "a number from 1", positive),
    },
    Setting {
        name: "upload-limit",
        value: Some("RATE"),
        default: "",
        help: "Limit the upload rate, such as 200MiB/s",
        long_help: "Limit uploads to this many bytes per second (`200MiB/s`, `1GB/s`). The limit does not apply to a directory (`file:///…`).",
        set: |config, option| {
            option.put(&mut config.store.upload_limit_bytes_per_s, "a rate such as 200MiB/s", optional(rate))
        },
    },
    Setting {
        name: "upload-pause-above",
        value: Some("RATE"),
        default: "",
        help: "Pause uploads while the job sends more than this rate, such as 1GB/s",
        long_help: "Pause uploads while this machine sends more than this many bytes per second in addition to them, on its busiest interface other than the loopback. Uploads continue when the rate falls below three quarters of that, and one part is sent every 30 s in any case. Traffic that the interface counters do not include (RDMA) is not seen. Does not apply to a directory (`file:///…`), nor to the final snapshot of a job.",
        set: |config, option| {
            option.put(
                &mut config.store.upload_pause_above_bytes_per_s,
                "a rate such as 1GB/s",
                optional(rate),
            )
        },
    },
    Setting {
        name: "resume",
        value: Some("WHICH"),
        default: "auto",
        help: "What to resume: auto, never, required, or a snapshot by its ID or tag",
        long_help: "What to do with snapshots of an earlier run of this job:\n  auto      resume the newest valid one, or start from the beginning if there is none\n  never     start from the beginning\n  required  resume, or fail if there is nothing to resume\n  ID        resume this one; also by its number, a prefix of its ID, or a tag",
        set: |config, option| {
            config.resume = match option.value.as_str() {
                "auto" => Resume::Auto,
                "never" => Resume::Never,
                "required" => Resume::Required,
                id => Resume::Snapshot(id.to_owned()),
            };
            Ok(())
        },
    },
    Setting {
        name: "resume-policy",
        value: Some("WHEN"),
        default: "1h",
        help: "After this time without success, resume an older snapshot than the newest; `newest`: never",
        long_help: "What to do when the newest snapshot is whole and still cannot be resumed, for instance because memory is short or a file is in the way. It is tried again, with growing delays. After this time (`1h`), an older snapshot is tried as well. The newest is then pinned, so that it is not deleted; once the cause is fixed, --resume ID resumes it. `newest` never resumes an older one: the run ends after its last try.",
        set: |config, option| {
            let parse = |text: &str| if text == "newest" { Some(None) } else { duration(text).map(Some) };
            option.put(&mut config.resume_policy, "a time such as 1h, or `newest`", parse)
        },
    },
    Setting {
        name: "files",
        value: Some("WHICH"),
        default: "auto",
        help: "Put back the files that the job has written: auto, strict, lenient, or off",
        long_help: "Which of the files that the job writes are part of its snapshots, so that a resume puts them back:\n  auto     those that the job is known to have written. With the rights for it, the kernel reports them. If one cannot be put back, the resume is refused, and the file is named. Nothing is changed then. Without these rights: as off\n  strict   as auto, but what changes below the working directory counts as the job's where nobody knows (`ckpt-run docs resuming`)\n  lenient  as strict, but a file that cannot be put back stays as it is, with a warning. The job may then fail, or compute something else\n  off      only files that are open for writing: they are cut to their length at the snapshot",
        set: |config, option| option.put(&mut config.files.coverage, "auto, strict, lenient, or off", named),
    },
    Setting {
        name: "files-exclude",
        value: Some("GLOB,…"),
        default: "",
        help: "Files that are not the job's: left alone by snapshots and resumes",
        long_help: "Patterns of files that are not the job's, separated by commas: caches, data sets, files of other programs (`*.tmp,/data/sets,**/wandb/**`). Snapshots do not contain them and a resume leaves them as they are. A pattern without a slash matches in every directory; a directory stands for everything below it. Always excluded: .git, __pycache__, .cache, .venv, node_modules.",
        set: |config, option| {
            let patterns = option.value.split(',').map(str::trim).filter(|pattern| !pattern.is_empty());
            config.files.exclude = patterns.map(str::to_owned).collect();
            FileRules::new(&config.files, Vec::new()).map(drop).map_err(bad_input)
        },
    },
    Setting {
        name: "files-budget",
        value: Some("SIZE"),
        default: "1GiB",
        help: "Copy at most this much of the job's files into one snapshot",
        long_help: "Copy at most this much of the job's changed files into one snapshot (`1GiB`, `500MB`). Larger files are shared by reflink where the file system has it (XFS, Btrfs). Otherwise a closed file is kept by a hard link until the snapshot is deleted, and a file that only grows by a checksum. `ckpt-run show` lists files that a resume could not put back.",
        set: |config, option| option.put(&mut config.files.budget_bytes, "a size such as 1GiB", size),
    },
    Setting {
        name: "criu",
        value: Some("PATH"),
        default: "",
        help: "The CRIU program [default: the one in PATH, or of the package ckpt-run-criu]",
        long_help: "The CRIU program, version 4.1 or newer. Default: the one in PATH, then /usr/local/sbin, /usr/sbin, /sbin. The one of the Python package ckpt-run-criu, installed with ckpt-run, is used if it is newer or the only one.",
        set: |config, option| {
            option.put(&mut config.criu, "a path", optional(parsed))?;
            check_trust(config.criu.as_deref(), option, |path| config.store.trust.check(path))
        },
    },
    Setting {
        name: "precopy",
        value: Some("ROUNDS"),
        default: "off",
        help: "Copy the job's memory while it runs, before the pause: auto, off, or a number of rounds",
        long_help: "Copy the job's memory while it runs, so that it is paused only while what has changed since is copied. Needs a kernel that tracks changes to memory (soft-dirty bits: x86-64 kernels of most distributions), and free memory for a second copy.\n  auto  where that is possible and a trial has shown that the pause gets shorter\n  off   never\n  N     always, in 1 to 8 rounds. Refused where the kernel cannot\nNot used for the last snapshot of a job that ends with it, nor for jobs with the interposer (--interpose).",
        set: |config, option| {
            option.put(&mut config.precopy, "auto, off, or a number of rounds from 1 to 8", Precopy::parse)
        },
    },
    Setting {
        name: "freeze-timeout",
        value: Some("TIME"),
        default: "60s",
        help: "Cancel a checkpoint that pauses the job for longer than this",
        long_help: "Cancel a checkpoint that pauses the job for longer than this. The job continues without a snapshot.",
        set: |config, option| option.put(&mut config.freeze_timeout, "a time such as 60s", duration),
    },
    Setting {
        name: "gpu-timeout",
        value: Some("TIME"),
        default: "5m",
        help: "How long a GPU driver may hang, or memory of a GPU be short, in a checkpoint or a resume before its job is ended",
        long_help: "How long a GPU driver may take beyond --freeze-timeout to save or restore a process. The process waits meanwhile. After this time its GPU state counts as lost: the job is ended, and restarted from its newest snapshot if --max-restarts allows it. Before a restore, ckpt-run also waits so long until enough memory of the GPUs is free; a resume without it ends with an error.",
        set: |config, option| option.put(&mut config.gpu_timeout, "a time such as 5m", duration),
    },
    Setting {
        name: "mirror",
        value: Some("WHICH"),
        default: "auto",
        help: "The copy of device memory in host memory between checkpoints: all, changed, none, or auto",
        long_help: "What the copy of device memory in host memory holds between checkpoints:\n  all      all device memory. A checkpoint pauses the job least\n  changed  nothing that the newest snapshot has: host memory is needed during a checkpoint only, for what has changed since (at the first checkpoint: for all). Device memory that cannot stay on the GPU meanwhile is read from the store\n  none     nothing, during a checkpoint neither: what has changed goes to the store through a window of at most 32 MiB for each process, and a quarter of its device memory. The job is paused until it is stored. Device memory has to stay on the GPU meanwhile\n  auto     all if that takes at most half of the host memory that is free at the first checkpoint, changed if there is memory for all device memory once, otherwise none\nAt a resume, the copy has all device memory first. Not with none, nor with auto where there is too little host memory for it: device memory then comes from the store through the window. It is read twice, to be verified before the job runs.",
        set: |config, option| option.put(&mut config.mirror, "auto, all, changed or none", named),
    },
    Setting {
        name: "gpu-map",
        value: Some("OLD=NEW,…"),
        default: "",
        help: "Resume on other GPUs: UUIDs of the snapshot's GPUs and of those that take their places",
        long_help: "Resume on other GPUs of the same type, with NVIDIA's driver 580 or newer: for each GPU (`GPU-…`, as `nvidia-smi -L` prints it, or the beginning of that), the one that takes its place. `ckpt-run show` prints the GPUs of a snapshot. GPUs that are not named stay, if they are there. For those that are missing, others of the same type are taken. A part that names a GPU on which the snapshot has nothing is ignored.",
        set: |config, option| {
            option.put(&mut config.gpu_map, "UUIDs such as GPU-1f=GPU-2a, separated by commas", GpuMap::parse)
        },
    },
    Setting {
        name: "network",
        value: Some("WHICH"),
        default: "host",
        help: "The network of the job: host, private (loopback only), or job (addresses of its own, on several nodes)",
        long_help: "The network of the job:\n  host     the network of the machine. When the job is resumed, the ports that it used must be free\n  private  a network namespace with a loopback interface only: ports never clash, and nothing outside is reachable\n  job      for a job on several nodes: the network of the machine, in which each node also has an address that stays when it is resumed on another machine. The nodes find each other there by the names of their machines. Packets between them go over VXLAN, in UDP packets to the port with the number of --coordinator. See `ckpt-run docs cluster`",
        set: |config, option| option.put(&mut config.network, "host, private or job", named),
    },
    Setting {
        name: "network-range",
        value: Some("ADDRESSES"),
        default: "198.18.0.0/15",
        help: "With --network job: from which addresses those of the job are chosen",
        long_help: "With --network job: the IPv4 addresses from which those of the job are chosen, as ADDRESS/BITS. Which of them a job gets depends on its name and its start, and stays the same until it is complete. Choose another range if these are used in your network: none of them may be an address that the job's machines need to reach.",
        set: |config, option| {
            let parse = |text: &str| parsed::<Ipv4Net>(text).map(|range| range.trunc());
            option.put(&mut config.nodes.network_range, "IPv4 addresses such as 198.18.0.0/15", parse)
        },
    },
    Setting {
        name: "nodes",
        value: Some("N"),
        default: "auto",
        help: "The number of nodes of the job: ckpt-run is started on each, and snapshots are of all of them",
        long_help: "The number of nodes of the job. `auto` is that of the step under Slurm (`srun ckpt-run …`), and 1 otherwise. By hand: start ckpt-run on each with the same --nodes, --coordinator and --cluster-key-file, and a --node-rank of its own. Snapshots are taken on all nodes at one moment, with the connections between them, and all nodes resume together. See `ckpt-run docs cluster`, also for what is not possible yet.",
        set: |config, option| {
            let parse =
                |text: &str| if text == "auto" { Some(None) } else { positive::<u32>(text).map(Some) };
            option.put(&mut config.nodes.nodes, "auto, or a number from 1", parse)
        },
    },
    Setting {
        name: "node-rank",
        value: Some("K"),
        default: "",
        help: "Which of the nodes this one is, from 0",
        long_help: "Which of the --nodes this one is, from 0. Node 0 coordinates. With a number of --nodes or more, this one is a spare, which waits until a node is lost and takes its place (--network job). A node keeps its number and its store from one start to the next. Without this option, the number comes from Slurm (SLURM_NODEID), or with --nodes or --coordinator from Open MPI (OMPI_COMM_WORLD_RANK), MPICH (PMI_RANK) or an indexed Job of Kubernetes (JOB_COMPLETION_INDEX).",
        set: |config, option| option.put(&mut config.nodes.rank, "a number from 0", optional(parsed)),
    },
    Setting {
        name: "coordinator",
        value: Some("HOST:PORT"),
        default: "",
        help: "Where the launcher of node 0 listens for those of the other nodes",
        long_help: "Where the launcher of node 0 listens for those of the other nodes: a name or an address of the machine of node 0, and a free TCP port. Not the rendezvous of the job itself. With several hosts, `HOST,HOST…:PORT`, node 0 listens at the first one that is its machine, and a spare on one of the others takes its place when it is lost. Without this option, it is under Slurm the first node of the step, with a port from 61000 to 64999 that depends on the job; the nodes of spares are further hosts.",
        set: |config, option| {
            option.put(&mut config.nodes.coordinator, "HOST:PORT", optional(Coordinator::parse))
        },
    },
    Setting {
        name: "cluster-key-file",
        value: Some("FILE"),
        default: "",
        help: "The key with which the launchers of the nodes recognise each other",
        long_help: "The file with the key with which the launchers of the nodes recognise each other: 32 bytes, or 64 hexadecimal digits, the same on all nodes. Without this option, the launchers use `cluster.key` in --store, which has to be the same directory or object store on all nodes then; the first launcher makes it, in a directory with mode 0600. In an object store with --encrypt-key-file, the key is made from that file. The key is never sent. Messages between launchers are authenticated with it, not encrypted; they hold nothing of the job's content.",
        set: |config, option| {
            let path = option.path();
            check_trust(path.as_deref(), option, |path| config.store.trust.check(path))?;
            config.nodes.key =
                path.map(|path| ClusterKey::from_file(&path)).transpose().map_err(bad_input)?;
            Ok(())
        },
    },
    Setting {
        name: "node-timeout",
        value: Some("TIME"),
        default: "10s",
        help: "A node that is silent for this long is lost: the job ends on all nodes",
        long_help: "A node of a job on several that is silent for this long, such as after its network has failed, is lost: the job ends on all nodes, and the same commands resume it. The end of a launcher shows at once. At least 3 s.",
        set: |config, option| {
            let parse = |text: &str| duration(text).filter(|time| *time >= SHORTEST_NODE_TIMEOUT);
            option.put(&mut config.nodes.timeout, "a time from 3s", parse)
        },
    },
    Setting {
        name: "lost-node",
        value: Some("WHAT"),
        default: "auto",
        help: "What the launchers do that are left when a node is lost: exit, wait for it, or auto",
        long_help: "What the launchers of a job on several nodes do that are left when the launcher of a node is lost, with its machine or without:\n  exit  all end with exit code 125. The scheduler starts all of them again, and the job resumes\n  wait  they wait until the scheduler has started the lost one again, and resume the job then\n  auto  wait for up to 10 minutes if there is a spare (a launcher whose --node-rank is --nodes or more), which takes the place of the node; otherwise exit\nA spare takes the place of node 0 only if its machine is one of the hosts of --coordinator. With several hosts, auto waits when node 0 is lost, whether there is a spare or not.",
        set: |config, option| option.put(&mut config.nodes.on_loss, "exit, wait or auto", named),
    },
    Setting {
        name: "replicas",
        value: Some("N"),
        default: "0",
        help: "Keep a copy of each snapshot in memory on another node: 0 or 1",
        long_help: "With 1, each snapshot in memory of a job on several nodes (--persist-every) is also in the memory of the next node. If a machine is lost and the launchers stay (a spare, or --lost-node wait), the job resumes from that snapshot: the part of the lost machine is read from the memory of the other one. Takes as much memory again on each machine, for two snapshots as far as they differ, and the network between the nodes carries what has changed.",
        set: |config, option| {
            let expected = "0 or 1";
            config.nodes.replicas =
                option.parse(expected, |text| text.parse().ok().filter(|number| *number <= 1))?;
            Ok(())
        },
    },
    Setting {
        name: "interpose",
        value: Some("WHICH"),
        default: "auto",
        help: "Preload libckpt_interpose.so for GPU jobs: auto, off, or its path",
        long_help: "Whether libckpt_interpose.so is preloaded into every process of the job. For a snapshot, it moves their GPU state to host memory and back:\n  auto  if it is beside ckpt-run or in ../lib, and the loader would find a CUDA driver (libcuda.so.1)\n  off   never. A job that uses a GPU then cannot be saved\n  PATH  this one, always\n`ckpt-run config` shows the outcome of auto.",
        set: |config, option| {
            let expected = if preload::IS_AVAILABLE {
                "auto, off or the path of libckpt_interpose.so"
            } else {
                "auto or off: libckpt_interpose.so is for x86-64 only"
            };
            config.interpose = option.parse(expected, Interposer::parse)?;
            let is_auto = option.value == "auto";
            option.found = is_auto.then(|| config.interpose.to_string());
            let library = config.interpose.library().filter(|_| !is_auto);
            check_trust(library, option, |path| config.store.trust.check(path))
        },
    },
    Setting {
        name: "nccl",
        value: Some("HOW"),
        default: "auto",
        help: "How NCCL connects the ranks of the job: auto, p2p (no NVLink multicast), or sockets (slow; no shared memory)",
        long_help: "How NCCL connects the ranks of a job:\n  auto     as NCCL chooses: peer access between GPUs, shared memory, NVLink multicast, InfiniBand. Memory that ranks share, of devices and of the host, and multicast objects are saved\n  p2p      device memory that ranks share by descriptors or by CUDA IPC only, without multicast. Sets NCCL_NVLS_ENABLE=0, NCCL_CUMEM_HOST_ENABLE=0 and NCCL_IB_DISABLE=1, and, in a job on one machine, NCCL_SOCKET_IFNAME=lo unless you have set it\n  sockets  by TCP sockets only: ranks share no memory, and a snapshot contains the sockets. Sets NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1, NCCL_NVLS_ENABLE=0 and NCCL_IB_DISABLE=1, and, in a job on one machine, NCCL_SOCKET_IFNAME=lo unless you have set it. Collectives are slower\nWith --network private, NCCL_SOCKET_IFNAME=lo is set in all cases; in ranks of torchrun that are all on this machine, too, unless you have set it or NCCL_COMM_ID. A job that is resumed keeps the variables with which it was started.",
        set: |config, option| option.put(&mut config.nccl, "auto, p2p or sockets", named),
    },
    Setting {
        name: "max-restarts",
        value: Some("N"),
        default: "32767",
        help: "Restart a failed job at most this many times; 0 disables restarts",
        long_help: "Restart a failed job (it exits with a code other than 0, or is killed) at most this many times, from its newest snapshot, or from the beginning if there is none; 0 disables restarts. The delay grows with each failure, up to 5 minutes, until there is a new snapshot. A job that fails 3 times from the same snapshot is restarted from an older one, at most twice; then ckpt-run gives up. It also gives up on a command that fails in its first 5 s. A job that its user interrupts (Ctrl-C) is not restarted.",
        set: |config, option| option.put(&mut config.max_restarts, "a number from 0", parsed),
    },
    Setting {
        name: "monitor-interval",
        value: Some("TIME"),
        default: "1s",
        help: "Polling interval for preemption triggers and hang detection",
        long_help: "Polling interval for preemption triggers and hang detection: how often --preempt-file is looked for and progress is checked (--hang-timeout), and the delay between two calls of --preempt-probe.",
        set: |config, option| option.put(&mut config.monitor_interval, "a time such as 1s", duration),
    },
    Setting {
        name: "hang-timeout",
        value: Some("TIME"),
        default: "off",
        help: "Restart a job that makes no progress for this long, `auto` or `off`",
        long_help: "Restart a job that makes no progress for this long, `auto` or `off`. `auto`: a rank of NCCL has done nothing for 30 seconds while other ranks wait for it in a collective, or nothing has happened in the job for 10 minutes. No progress means: no process used more than 1% of a CPU or submitted work to a GPU, or one process was stopped (SIGSTOP) all the time. The CPU time of a process that waits for its GPU does not count. Before the restart, the stacks of its threads are written to the store, with Python stacks if py-spy is on the PATH. Choose a value longer than the longest wait of the job, for example for GPU kernels or a slow disk.",
        set: |config, option| {
            option.put(&mut config.hang_timeout, "a time such as 10m, auto, or off", or_off(hang_timeout))
        },
    },
    Setting {
        name: "on-signal",
        value: Some("SIGNAL,…"),
        default: "TERM,HUP,INT",
        help: "Preempt the job on these signals (INT: Ctrl-C): final snapshot, then exit code 75; or `off`",
        long_help: "When ckpt-run receives one of these signals (TERM, USR1, USR2, HUP, INT, QUIT, XCPU; several are separated by commas), it takes a final snapshot, ends the job, and exits with code 75, on which schedulers queue the job again. A second signal ends everything immediately. INT is also Ctrl-C at the terminal, except while a program of the job reads single keys (a shell, an editor): it has no deadline, and if the job cannot be saved, the key is passed on to it. Signals that are not named here are passed on to the job. A signal that ckpt-run was started to ignore stays ignored (`nohup`).",
        set: |config, option| {
            let expected =
                "TERM, USR1, USR2, HUP, INT, QUIT, XCPU, several of them separated by commas, or off";
            config.on_signal = option.parse(expected, or_off(preempting_signals))?.unwrap_or_default();
            Ok(())
        },
    },
    Setting {
        name: "preempt-file",
        value: Some("PATH"),
        default: "",
        help: "Preempt the job when this file appears",
        long_help: "Preempt the job, as --on-signal does, when this file is created or replaced. A file that exists when ckpt-run starts is ignored.",
        set: |config, option| option.put(&mut config.preempt_file, "a path", optional(parsed)),
    },
    Setting {
        name: "preempt-probe",
        value: Some("CMD"),
        default: "",
        help: "Preempt the job when this shell command exits with 0",
        long_help: "Preempt the job, as --on-signal does, when this shell command exits with 0. The command runs beside the job, outside of its namespaces. When it exits with another code, it is called again: it may wait for the event, or check once and exit.",
        set: |config, option| {
            option.put(&mut config.preempt_probe, "a command", optional(parsed))?;
            let command = config.preempt_probe.as_deref().unwrap_or_default();
            let mut programs = programs_of(command).into_iter();
            programs
                .try_for_each(|path| check_trust(Some(&path), option, |path| config.store.trust.check(path)))
        },
    },
    Setting {
        name: "grace",
        value: Some("TIME"),
        default: "30s",
        help: "Time to save and end a preempted job",
        long_help: "Time to save and end a preempted job, counted from the signal. If the snapshot is not stored in this time, the job is ended without it, and the next run resumes from an older snapshot. Choose a value a little shorter than the grace period of the scheduler.",
        set: |config, option| option.put(&mut config.grace, "a time such as 30s", duration),
    },
    Setting {
        name: "log-file",
        value: Some("FILE"),
        default: "",
        help: "Also write the messages of ckpt-run to this file",
        long_help: "Also write the messages of ckpt-run to this file, with times and details.",
        set: |config, option| {
            option.put(&mut config.log_file, "a path", optional(parsed))?;
            check_trust(config.log_file.as_deref(), option, |path| config.store.trust.check_written(path))
        },
    },
    Setting {
        name: "log-format",
        value: Some("FORMAT"),
        default: "text",
        help: "Format of the messages of ckpt-run: text or json",
        long_help: "Format of the messages of ckpt-run: `text`, or `json` for one object per line with timestamp, level, target and fields.message. Applies to stderr and --log-file.",
        set: |config, option| option.put(&mut config.log_format, "text or json", named),
    },
    Setting {
        name: "metrics",
        value: Some("ADDR"),
        default: "",
        help: "Serve Prometheus metrics on this port (loopback only), or on IP:PORT",
        long_help: "Serve Prometheus metrics at `http://ADDR/metrics` while the job runs. A port alone (`9400`) is reachable from this machine only; `IP:PORT` is used as given (`0.0.0.0:9400`: reachable from every network of this machine). Port 0 chooses a free port, which is logged.",
        set: |config, option| {
            option.put(&mut config.metrics, "a port such as 9400, or IP:PORT", optional(listen_address))
        },
    },
    Setting {
        name: "notify",
        value: Some("URL"),
        default: "",
        help: "Send a notification to this web address when the job starts, fails, is resumed or ends",
        long_help: "Send a notification to this web address (`https://…`) when the job is started or resumed, fails, is not restarted any more, or ends. It is a POST with a JSON object (`ckpt-run docs unattended`); its `text` is what Slack and Mattermost show. A notification that cannot be sent is tried again for ten minutes, and has no effect on the job. The address is often a secret: prefer the variable or the configuration file. ckpt-run prints its host only.",
        set: |config, option| {
            option.put(
                &mut config.notify,
                "an address such as https://HOST/PATH",
                optional(Address::parse),
            )?;
            option.value = config.notify.as_ref().map(ToString::to_string).unwrap_or_default();
            Ok(())
        },
    },
    Setting {
        name: "verbose",
        value: None,
        default: "0",
        help: "Log more (-vv: everything)",
        long_help: "Log more of what ckpt-run does. Given twice: everything.",
        set: |config, option| {
            config.verbosity += option.parse("a number", count)?;
            Ok(())
        },
    },
    Setting {
        name: "quiet",
        value: None,
        default: "0",
        help: "Log less (-qq: errors only)",
        long_help: "Log less: only warnings and errors. Given twice: only errors.",
        set: |config, option| {
            config.verbosity -= option.parse("a number", count)?;
            Ok(())
        },
    },
    TRUST,
    CONFIG_FILE,
];

impl Setting {
    fn short(&self) -> Option<char> {
        SHORT.iter().find(|(name, _)| *name == self.name).map(|(_, short)| *short)
    }

    /// The name of the environment variable.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("CKPT_{}", self.name.to_uppercase().replace('-', "_"))
    }

    /// The default as the help shows it; empty if there is nothing to show.
    fn shown_default(&self) -> &str {
        if self.value.is_some() { self.default } else { "" }
    }

    fn arg(&self) -> Arg {
        let variable = self.variable();
        let default = match self.shown_default() {
            "" => String::new(),
            default => format!(" [default: {default}]"),
        };
        let arg = Arg::new(self.name)
            .long(self.name)
            .short(self.short())
            .global(true)
            .help(format!("{}{default}", self.help))
            .long_help(format!("{}\n{default} [variable: {variable}]", self.long_help));
        match self.value {
            // A negative number is refused as a value, not as an unknown option.
            Some(value) => arg.value_name(value).allow_negative_numbers(true).action(ArgAction::Set),
            None => arg.action(ArgAction::Count),
        }
    }
}

/// The flags of all options.
pub fn args() -> impl Iterator<Item = Arg> {
    SETTINGS.iter().map(Setting::arg)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/options.md");
    const BEGIN: &str = "<!-- options: generated from the settings table by a test; do not edit -->\n";
    const END: &str = "<!-- end of options -->";
    /// Set to 1, it has the test write the page instead of checking it.
    const UPDATE: &str = "CKPT_UPDATE_DOCS";

    fn table() -> String {
        let mut table = "| flag | variable | default | meaning |\n|---|---|---|---|\n".to_owned();
        let code = |text: &str| if text.is_empty() { String::new() } else { format!("`{text}`") };
        for setting in SETTINGS {
            let short = setting.short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
            let value = setting.value.map(|value| format!(" {value}")).unwrap_or_default();
            let cells = [
                format!("{short}`--{}{value}`", setting.name),
                code(&setting.variable()),
                code(setting.shown_default()),
                setting.help.to_owned(),
            ];
            table.push_str(&format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | ")));
        }
        table
    }

    #[test]
    fn the_table_in_the_documentation_is_up_to_date() {
        let page = std::fs::read_to_string(PAGE).unwrap();
        let (before, rest) = page.split_once(BEGIN).expect("docs/options.md has the marker");
        let (written, after) = rest.split_once(END).expect("docs/options.md has the end marker");
        if std::env::var(UPDATE).is_ok_and(|value| value == "1") {
            std::fs::write(PAGE, format!("{before}{BEGIN}{}{END}{after}", table())).unwrap();
            return;
        }
        assert!(
            written == table(),
            "docs/options.md is out of date. Write it with `{UPDATE}=1 cargo test -p ckpt-run the_table_in`"
        );
    }

    #[test]
    fn names_are_unique() {
        for (number, setting) in SETTINGS.iter().enumerate() {
            assert!(SETTINGS.iter().skip(number + 1).all(|other| other.name != setting.name));
        }
    }
}
