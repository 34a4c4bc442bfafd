//! Starting the command at its beginning.

use super::startup::OpenedJob;
use crate::checkpoint::running_job::RunningJob;
use crate::cli::args::similar_command;
use crate::cli::config::Config;
use crate::cluster::JobNetwork;
use crate::container::preloadable;
use crate::files::history::FileHistory;
use crate::files::inventory::nanoseconds;
use crate::files::rules::FileRules;
use crate::files::tracking;
use crate::gpu::{nccl, preload};
use crate::job::alive::end_put_back;
use crate::job::earlier_init;
use crate::job::journal::{Entry, EventKind};
use crate::namespace::stdio::Stdio;
use crate::namespace::{Namespace, StartError};
use crate::report::failure::OF_COMMAND;
use crate::store::answer::RECORDING;
use crate::sys::error::{EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, bad_input};
use anyhow::{Context, Result};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Finds the file of a command.
fn find(program: &OsStr) -> Option<PathBuf> {
    let places: Vec<_> = match Path::new(program).components().count() {
        1 => {
            let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
            std::env::split_paths(&path).map(|dir| dir.join(program)).collect()
        }
        _ => vec![PathBuf::from(program)],
    };
    // A file that the kernel cannot look at now may be the command: its start will say why it fails.
    let is_absent = |error: io::Error| {
        use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
        matches!(error.kind(), NotFound | NotADirectory | PermissionDenied)
    };
    let may_exist = |path: &&PathBuf| std::fs::metadata(path).is_err_and(|error| !is_absent(error));
    places.iter().find(|path| path.is_file()).or_else(|| places.iter().find(may_exist)).cloned()
}

/// Reports a missing command before anything is changed.
///
/// # Errors
/// The exit code.
pub fn find_command(program: &OsStr) -> Result<(), i32> {
    if find(program).is_some() {
        return Ok(());
    }
    if Path::new(program).components().count() > 1 && Path::new(program).is_dir() {
        tracing::error!("cannot run {program:?}: it is a directory");
        return Err(EXIT_NOT_EXECUTABLE);
    }
    let meant = program.to_str().and_then(similar_command).map(|similar| format!("ckpt-run {similar}"));
    let hint = match as_script(program).or(meant) {
        Some(meant) => format!("Did you mean `{meant}`? Check PATH too"),
        None => "Check its spelling, and PATH".to_owned(),
    };
    tracing::error!("there is no command {program:?}. {hint}");
    Err(EXIT_NOT_FOUND)
}

/// How a file that is no command would be run: `python3 train.py`.
fn as_script(file: &OsStr) -> Option<String> {
    let path = Path::new(file);
    let name = path.is_file().then(|| file.to_str()).flatten()?;
    Some(match path.extension().and_then(OsStr::to_str) {
        Some("py") => format!("ckpt-run python3 {name}"),
        Some("sh") => format!("ckpt-run sh {name}"),
        _ if path.components().count() == 1 => format!("ckpt-run ./{name}"),
        _ => return None,
    })
}

/// The variables of `--nccl` for the job.
///
/// # Errors
/// Bad input: the user's variables say the opposite.
pub fn nccl_variables(config: &Config) -> Result<Vec<(String, OsString)>> {
    let is_alone = config.nodes.several().is_none();
    nccl::variables(config.nccl, config.network, is_alone, |name| std::env::var_os(name)).map_err(bad_input)
}

/// The command cannot be executed.
pub struct NotExecuted {
    /// The exit code.
    pub code: i32,
    /// For the journal.
    pub entry: Entry,
}

/// Starts `argv`, in a network of the job's own if it has one, unless the command cannot be executed.
///
/// # Errors
/// When the job's namespace or streams cannot be created.
pub fn start(
    (config, job_network): (&Config, Option<&JobNetwork>),
    argv: &[OsString],
    opened: &OpenedJob,
    rules: &FileRules,
) -> Result<Result<RunningJob, NotExecuted>> {
    let OpenedJob { dir, answers, .. } = opened;
    let stdio = Stdio::prepare(None).context("cannot create the job's standard streams")?;
    let namespace = Namespace::create(config.network, None)?;
    answers.during(RECORDING, || earlier_init::record(dir, &namespace))?;
    if let Some(network) = job_network {
        namespace.set_names(network.names()?)?;
    }
    let wanted = config.interpose.library().is_some();
    if wanted && let Some(why) = find(&argv[0]).as_deref().and_then(preloadable::obstacle) {
        tracing::warn!(
            "{:?} {why}, so that the interposer cannot be loaded into it: if it uses the GPU itself, it cannot be saved. Programs that it starts are not affected",
            argv[0]
        );
    }
    let agents = wanted.then(|| preload::listen(dir, None, config.gpu_timeout)).transpose()?;
    let mut files = FileHistory::new(nanoseconds(SystemTime::now()));
    let cwd = std::env::current_dir().context("cannot read the working directory")?;
    let record = answers.during(RECORDING, || {
        // A resume that was interrupted is of no account any more.
        if let Err(error) = end_put_back(dir) {
            tracing::debug!("cannot remove the record of an interrupted resume: {error}");
        }
        tracking::begin(&namespace, dir, &cwd, rules, &mut files, None)
    });
    let mut variables = preload::variables(&config.interpose, dir)?;
    variables.extend(nccl_variables(config)?);
    variables.extend(job_network.iter().flat_map(|network| network.variables(|name| std::env::var_os(name))));
    let started = {
        let (sources, fds) = stdio.for_start();
        namespace.start_job(argv, variables, stdio.terminal_path(), sources, &fds)
    };
    match started {
        Ok((root_pid, command_pid)) => {
            if record.is_some() {
                files.touch(tracking::next(&namespace, record.as_ref()));
            }
            let failed_process = None;
            Ok(Ok(RunningJob { namespace, stdio, root_pid, command_pid, agents, files, failed_process }))
        }
        Err(StartError::Command(error)) => {
            let meant = as_script(&argv[0]).map(|meant| format!(". Did you mean `{meant}`?"));
            let why = format!("cannot run {:?}: {error}", argv[0]);
            let remedy = format!("{OF_COMMAND}{}", meant.unwrap_or_default());
            tracing::error!("{why}. {remedy}");
            let missing = error.kind() == io::ErrorKind::NotFound;
            let code = if missing { EXIT_NOT_FOUND } else { EXIT_NOT_EXECUTABLE };
            Ok(Err(NotExecuted { code, entry: Entry::new(EventKind::NotStarted, why).remedy(Some(remedy)) }))
        }
        Err(StartError::Namespace(error)) => Err(error.into()),
    }
}
