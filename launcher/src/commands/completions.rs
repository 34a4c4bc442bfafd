//! Completions for shells: clap's script for the shell, and in it a call of this program for what only the store knows.
//!
//! ```text
//!   ckpt-run show 0<TAB>  ──►  ckpt-run __complete show 0  ──►  one candidate per line: NAME, tab, description
//! ```

use super::jobs::jobs;
use super::print;
use crate::cli::args;
use crate::cli::config::Config;
use crate::store::root::Root;
use crate::store::tiers;
use crate::sys::secrets;
use anyhow::Result;
use ckpt_snapshot::{JobDir, Marks};
use clap::{Arg, ArgAction, ArgMatches};
use clap_complete::Shell;
use std::ffi::OsString;
use std::io::{self, Write};

/// The first argument with which the shell asks. The words of the command line follow, the last one unfinished.
pub const ARGUMENT: &str = "__complete";

/// Values of options that have names.
const VALUES: &[(&str, &[&str])] = &[
    ("compress", &["off", "auto", "zstd"]),
    ("staging", &["auto", "memory", "any"]),
    ("files", &["auto", "strict", "lenient", "off"]),
    ("precopy", &["auto", "off"]),
    ("mirror", &["auto", "all", "changed", "none"]),
    ("network", &["host", "private", "job"]),
    ("nodes", &["auto"]),
    ("lost-node", &["exit", "wait", "auto"]),
    ("interpose", &["auto", "off"]),
    ("nccl", &["auto", "p2p", "sockets"]),
    ("hang-timeout", &["auto", "off"]),
    ("interval", &["off"]),
    ("resume-policy", &["newest"]),
    ("log-format", &["text", "json"]),
    ("on-signal", &["off", "TERM", "USR1", "USR2", "HUP", "INT", "QUIT", "XCPU"]),
];

/// Values of `--resume`, besides snapshots.
const RESUME: [&str; 3] = ["auto", "never", "required"];

/// Writes the script for a shell.
///
/// # Errors
/// When it cannot be written.
pub fn script(shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut args::command(), "ckpt-run", &mut script);
    let script = String::from_utf8_lossy(&script);
    match shell {
        Shell::Bash => {
            let end = script.rfind("\nif [[ ").unwrap_or(script.len());
            let (functions, registration) = script.split_at(end);
            // clap_complete 4.6.11 writes a name with a hyphen in two ways: after a command, nothing was completed.
            let functions = functions.replace("ckpt__subcmd__run", "ckpt__run");
            let registration = registration.replace("-F _ckpt__run ", "-F _ckpt_run_names ");
            write!(out, "{functions}\n{BASH}{registration}")
        }
        Shell::Zsh => {
            let (head, rest) = script.split_once('\n').unwrap_or((&script, ""));
            let rest = rest.replace(":_default'", ":_ckpt_run_names'");
            // The job's command is none of ours: its arguments are files.
            let end = rest.rfind(ZSH_END).unwrap_or(rest.len());
            let (ours, rest) = rest.split_at(end);
            write!(out, "{head}\n\n{ZSH}{ours}\n(*)\n_default\n;;{rest}")
        }
        Shell::Fish => {
            write!(out, "{script}{FISH}")?;
            let options = VALUES.iter().map(|(option, _)| *option).chain(["job", "whole-job", "resume"]);
            options.into_iter().try_for_each(|option| {
                writeln!(out, "complete -c ckpt-run -l {option} -x -a '(__fish_ckpt_run_names)'")
            })
        }
        _ => out.write_all(script.as_bytes()),
    }
}

const BASH: &str = r#"
_ckpt_run_names() {
    _ckpt__run "$@"
    local found
    mapfile -t found < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#found[@]} -gt 0 ]]; then
        COMPREPLY=("${found[@]%%$'\t'*}")
    fi
}
"#;

const ZSH: &str = r#"_ckpt_run_names() {
    # The whole line: `_arguments` has removed what stands before the command.
    local -a typed found
    typed=("${(@Q)${(z)LBUFFER}}")
    [[ $LBUFFER == *[[:space:]] ]] && typed+=("")
    found=("${(@f)$("${typed[1]}" __complete "${(@)typed[2,-1]}" 2>/dev/null)}")
    found=("${(@)found%%$'\t'*}")
    if [[ -n "${found[1]}" ]]; then
        compadd "$@" -V names -- "${found[@]}"
    else
        _default "$@"
    fi
}
"#;

/// The end of the list of commands.
const ZSH_END: &str = "\n        esac\n    ;;\nesac\n}\n";

const FISH: &str = r#"
function __fish_ckpt_run_names
    set -l words (commandline -opc) (commandline -ct)
    set -l program $words[1]
    set -e words[1]
    $program __complete $words 2>/dev/null
end
complete -c ckpt-run -a '(__fish_ckpt_run_names)'
"#;

/// Answers a shell: writes the candidates for the last of `words`. What cannot be read has none.
pub fn answer(words: impl Iterator<Item = OsString>) {
    let words = joined(words.filter_map(|word| word.into_string().ok()));
    let mut out = io::stdout().lock();
    let _ = write(&mut out, candidates(&words, &configured).unwrap_or_default());
}

/// Bash completes without quotes, and others may write to the store: what would need them is left out.
fn write(out: &mut impl Write, found: Candidates) -> io::Result<()> {
    let is_safe = |(name, _): &(String, String)| Marks::is_tag(name);
    found
        .into_iter()
        .filter(is_safe)
        .try_for_each(|(name, description)| writeln!(out, "{name}\t{}", print::plain(&description)))
}

/// Bash splits `--option=value` into three words.
fn joined(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    let mut is_open = false;
    for word in words {
        let is_part = word == "=" || is_open;
        is_open = word == "=";
        match joined.last_mut().filter(|last| is_part && last.starts_with("--")) {
            Some(last) => last.push_str(&word),
            None => joined.push(word),
        }
    }
    joined
}

/// Names with their descriptions.
type Candidates = Vec<(String, String)>;

/// What is completed.
enum Kind<'a> {
    /// The value of an option of ours.
    Value(&'a str),
    /// An argument of a command of ours, by its name.
    Argument(&'a str),
}

/// The candidates for the last word with their descriptions. `None` if it is not known what belongs there.
fn candidates(words: &[String], configured: &dyn Fn(&[String]) -> Option<Config>) -> Option<Candidates> {
    let (current, typed) = words.split_last()?;
    let command = args::command();
    let kind = kind(&command, typed).filter(|_| !current.starts_with('-'))?;
    let found = match kind {
        Kind::Value("job" | "whole-job") | Kind::Argument("JOB") => {
            of_store(&configured(typed)?, job_name).ok()?
        }
        Kind::Argument("ID" | "OTHER") => of_store(&configured(typed)?, snapshots).ok()?,
        Kind::Argument("TAG") => of_store(&configured(typed)?, tags).ok()?,
        Kind::Value("resume") => {
            let snapshots = configured(typed).and_then(|config| of_store(&config, snapshots).ok());
            let fixed = RESUME.iter().map(|value| (value.to_string(), String::new()));
            fixed.chain(snapshots.unwrap_or_default()).collect()
        }
        Kind::Value(option) => {
            let (_, values) = VALUES.iter().find(|(name, _)| *name == option)?;
            values.iter().map(|value| (value.to_string(), String::new())).collect()
        }
        Kind::Argument(_) => return None,
    };
    Some(found.into_iter().filter(|(name, _)| name.starts_with(current.as_str())).collect())
}

/// What comes after these words. `None` for a word of the job's command, and for what the shell's script knows.
fn kind<'a>(command: &'a clap::Command, typed: &[String]) -> Option<Kind<'a>> {
    let (mut ours, mut arguments, mut open) = (command, 0, None);
    for word in typed {
        if open.take().is_some() {
            continue;
        }
        if word == "--" {
            return None;
        }
        if word.starts_with('-') && word.len() > 1 {
            open = ours.get_arguments().find(|arg| takes_value(arg, word));
        } else if std::ptr::eq(ours, command) {
            ours = command.find_subcommand(word).filter(|found| found.get_name() != "run")?;
        } else {
            arguments += 1;
        }
    }
    if let Some(option) = open {
        return Some(Kind::Value(option.get_id().as_str()));
    }
    let positionals: Vec<_> = ours.get_positionals().collect();
    let is_list = |arg: &&&Arg| arg.get_num_args().is_some_and(|range| range.max_values() > 1);
    let next = positionals.get(arguments).or_else(|| positionals.last().filter(is_list));
    next.map(|argument| Kind::Argument(argument.get_id().as_str()))
}

/// Whether the value of this option is the word after `word`.
fn takes_value(arg: &Arg, word: &str) -> bool {
    let is_named = arg.get_long().is_some_and(|long| word.strip_prefix("--") == Some(long))
        || arg.get_short().is_some_and(|short| word.strip_prefix('-') == Some(short.to_string().as_str()));
    is_named && matches!(arg.get_action(), ArgAction::Set | ArgAction::Append)
}

/// The configuration for a command line that is not finished. An object store is not asked: that would take seconds.
fn configured(typed: &[String]) -> Option<Config> {
    let words = std::iter::once("ckpt-run").chain(typed.iter().map(String::as_str));
    let matches = args::command().ignore_errors(true).try_get_matches_from(words).ok()?;
    let options: &ArgMatches = matches.subcommand().map_or(&matches, |(_, options)| options);
    let config = Config::resolve(options, &|name| std::env::var(name).ok()).ok()?;
    config.store.url.is_none().then_some(config)
}

/// What `read` finds in the jobs of the store, or of the job that is named.
fn of_store(config: &Config, read: fn(&Config, &JobDir) -> Result<Candidates>) -> Result<Candidates> {
    let root = Root::open(&config.store)?;
    let jobs = jobs(config, &root, None)?;
    // One that cannot be read is left out.
    Ok(jobs.iter().filter_map(|job| read(config, job).ok()).flatten().collect())
}

fn job_name(_: &Config, job: &JobDir) -> Result<Candidates> {
    let record = job.record()?;
    let command = record.map(|record| secrets::hidden_in(&record.argv).join(" "));
    Ok(vec![(job.key().to_string(), command.unwrap_or_default())])
}

/// The newest first.
fn snapshots(config: &Config, job: &JobDir) -> Result<Candidates> {
    let store = tiers::open(&config.store, job)?;
    let all = tiers::list_local(&store)?;
    let taken = |listed: &ckpt_snapshot::Listed| {
        let manifest = listed.manifest.as_ref().ok()?;
        Some(format!("{}, {}", job.key(), print::ago(manifest.taken_unix_ms)))
    };
    Ok(all.iter().rev().map(|one| (one.id.to_string(), taken(one).unwrap_or_default())).collect())
}

fn tags(_: &Config, job: &JobDir) -> Result<Candidates> {
    let marks = job.marks()?;
    let of = |id| marks.of(id).into_iter().flat_map(move |mark| mark.tags.iter().map(move |tag| (tag, id)));
    Ok(marks.kept().flat_map(of).map(|(tag, id)| (tag.clone(), id.to_string())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    fn kind_of(line: &str) -> Option<String> {
        let command = args::command();
        let kind = kind(&command, &words(line)[..words(line).len() - 1])?;
        Some(match kind {
            Kind::Value(option) => format!("--{option}"),
            Kind::Argument(name) => name.to_owned(),
        })
    }

    #[test]
    fn it_is_known_what_a_word_is() {
        for (line, kind) in [
            ("show ", Some("ID")),
            ("--store d show 0", Some("ID")),
            ("--store=d -v rm 1 2 ", Some("ID")),
            ("diff 1 ", Some("OTHER")),
            ("tag --store d 1 ", Some("TAG")),
            ("status --watch tr", Some("JOB")),
            ("status train ", None),
            ("--job ", Some("--job")),
            ("ls -j ", Some("--job")),
            ("rm --dry-run --whole-job ", Some("--whole-job")),
            ("export 1 --format ", Some("--format")),
            ("--compress ", Some("--compress")),
            ("ls --compress off ", Some("JOB")),
            // The job's own command line.
            ("python train.py ", None),
            ("run python ", None),
            ("-- show ", None),
            ("sho", None),
        ] {
            assert_eq!(kind_of(line).as_deref(), kind, "{line:?}");
        }
    }

    #[test]
    fn values_of_options_are_offered_and_can_be_used() {
        let nowhere = |_: &[String]| None;
        let offered = |line: &str| -> Option<Vec<String>> {
            let found = candidates(&words(line), &nowhere)?;
            Some(found.into_iter().map(|(name, _)| name).collect())
        };
        assert_eq!(offered("--compress a").unwrap(), ["auto"]);
        assert_eq!(offered("ls --resume ").unwrap(), RESUME);
        assert_eq!(offered("--compress -"), None);
        assert_eq!(offered("--on-signal U").unwrap(), ["USR1", "USR2"]);
        assert_eq!(offered("--grace "), None);
        assert_eq!(offered("show "), None, "without a store");
        for (option, values) in VALUES.iter().chain([&("resume", &RESUME[..])]) {
            for value in *values {
                let line = words(&format!("ls --{option} {value}"));
                let found =
                    args::command().try_get_matches_from(std::iter::once("ckpt-run".to_owned()).chain(line));
                let found = found.unwrap();
                let resolved = Config::resolve(found.subcommand().unwrap().1, &|_| None);
                assert!(resolved.is_ok(), "--{option} {value}: {:?}", resolved.err());
            }
        }
    }

    #[test]
    fn names_that_need_quotes_are_not_offered() {
        let names = ["best-1.0_x", "x;command", "$(command)", "a b", "*", ""];
        let mut out = Vec::new();
        write(&mut out, names.map(|name| (name.to_owned(), "* [a]".to_owned())).into()).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "best-1.0_x\t* [a]\n");
    }

    #[test]
    fn words_that_bash_has_split_are_joined() {
        let line = words("--store = d show --resume =");
        assert_eq!(joined(line.into_iter()), ["--store=d", "show", "--resume="]);
        assert_eq!(joined(words("tag 1 = x").into_iter()), ["tag", "1", "=", "x"]);
    }

    #[test]
    fn the_scripts_ask_this_program() {
        for (shell, parts) in [
            (Shell::Bash, &["complete -F _ckpt_run_names -o", "_ckpt__run \"$@\""][..]),
            (
                Shell::Zsh,
                &[
                    "#compdef ckpt-run\n",
                    "':ID -- The snapshot",
                    "tag:_ckpt_run_names'",
                    "NAME:_ckpt_run_names'",
                    "\n(*)\n_default\n;;\n        esac\n",
                ],
            ),
            (Shell::Fish, &["complete -c ckpt-run -a '(__fish_ckpt_run_names)'", "-l job -x"]),
        ] {
            let mut out = Vec::new();
            script(shell, &mut out).unwrap();
            let out = String::from_utf8(out).unwrap();
            assert!(out.contains(ARGUMENT), "{shell}");
            parts.iter().for_each(|part| assert!(out.contains(part), "{shell}: {part}"));
            assert!(
                !out.contains("complete -F _ckpt__run -o") && !out.contains("ckpt__subcmd__run"),
                "{shell}"
            );
        }
    }
}
