//! Fault injection: `SIMCUDA_FAULT="cuMemAlloc_v2:3=CUDA_ERROR_OUT_OF_MEMORY;cuLaunchKernel:10+=lose-device"`.
//!
//! Each rule is `SYMBOL:N=ACTION`: the Nth call of that symbol in this process, or with `N+` the Nth and every
//! later one; `*` is every symbol. An action is an error's name or number, `delay:MILLISECONDS`, `hang` (the call never
//! returns), `crash` (the process aborts), or `lose-device`, which makes every context fail permanently with
//! CUDA_ERROR_UNKNOWN. Calls of the real driver's checkpoint API hang and crash too (nccl issue 2340; cuda-checkpoint
//! issues 17 and 58).
//!
//! `SIMCUDA_FAULT_FILE` names a file with rules: they apply while the file exists, and calls count from its
//! creation. It has to be put in place by renaming, never written in place. The symbol of each call that such a rule
//! hits is added to the file of the same name with the extension `hits`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use cuda_abi::sys::CUresult;
use parking_lot::Mutex;

use crate::error::Result;
use crate::{context, proc_address};

struct Rule {
    symbol: String,
    nth: u64,
    and_later: bool,
    action: Action,
    calls: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Action {
    Fail(CUresult),
    Delay(Duration),
    Hang,
    Crash,
    LoseDevice,
}

static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| parsed("SIMCUDA_FAULT", &std::env::var("SIMCUDA_FAULT").unwrap_or_default()));
static FILE: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("SIMCUDA_FAULT_FILE").map(PathBuf::from));

/// The rules of a file, with what distinguishes it from the previous file.
struct FromFile {
    version: (u64, i64, i64),
    rules: Arc<Vec<Rule>>,
}

static FROM_FILE: Mutex<Option<FromFile>> = Mutex::new(None);

/// Rules with a mistake in them must not pass for faults that were survived.
fn parsed(from: &str, text: &str) -> Vec<Rule> {
    parse(text).unwrap_or_else(|message| {
        eprintln!("simcuda: {from}: {message}");
        std::process::exit(2);
    })
}

/// The rules of the file as it is now.
fn from_file() -> Option<Arc<Vec<Rule>>> {
    let path = FILE.as_ref()?;
    let mut known = FROM_FILE.lock();
    let Ok(meta) = fs::metadata(path) else {
        *known = None;
        return None;
    };
    let version = (meta.ino(), meta.ctime(), meta.ctime_nsec());
    if let Some(known) = known.as_ref().filter(|known| known.version == version) {
        return Some(Arc::clone(&known.rules));
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    let rules = Arc::new(parsed("SIMCUDA_FAULT_FILE", text.trim_end()));
    *known = Some(FromFile { version, rules: Arc::clone(&rules) });
    Some(rules)
}

fn note_hit(symbol: &str) {
    let Some(path) = FILE.as_ref() else { return };
    let noted = fs::File::options().append(true).create(true).open(path.with_extension("hits"));
    let noted = noted.and_then(|mut file| file.write_all(format!("{symbol}\n").as_bytes()));
    if let Err(error) = noted {
        eprintln!("simcuda: SIMCUDA_FAULT_FILE: {error}");
    }
}

/// Called before each handler.
///
/// # Errors
/// The injected one, if this call is due.
pub(crate) fn before(symbol: &str) -> Result {
    let mut result = Ok(());
    let from_file = from_file();
    let in_file = from_file.iter().flat_map(|rules| rules.iter());
    let rules = RULES.iter().map(|rule| (rule, false)).chain(in_file.map(|rule| (rule, true)));
    // Each rule counts the call, whatever another one makes of it; the first error is the call's.
    for (rule, is_from_file) in rules.filter(|(rule, _)| rule.is_due(symbol)) {
        if is_from_file {
            note_hit(symbol);
        }
        match rule.action {
            Action::Fail(error) => result = result.and(Err(error)),
            Action::Delay(time) => std::thread::sleep(time),
            Action::Hang => loop {
                std::thread::park();
            },
            Action::Crash => std::process::abort(),
            Action::LoseDevice => context::lose_all(CUresult::CUDA_ERROR_UNKNOWN),
        }
    }
    result
}

impl Rule {
    /// Counts a call; whether it is one of the rule's.
    fn is_due(&self, symbol: &str) -> bool {
        if self.symbol != "*" && self.symbol != symbol {
            return false;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        call == self.nth || (call > self.nth && self.and_later)
    }
}

fn parse(text: &str) -> std::result::Result<Vec<Rule>, String> {
    text.split(';').map(str::trim).filter(|rule| !rule.is_empty()).map(parse_rule).collect()
}

fn parse_rule(text: &str) -> std::result::Result<Rule, String> {
    let expected = || format!("{text:?} is not SYMBOL:N=ACTION");
    let (call, action) = text.split_once('=').ok_or_else(expected)?;
    let (symbol, nth) = call.split_once(':').ok_or_else(expected)?;
    let (nth, and_later) = nth.strip_suffix('+').map_or((nth, false), |nth| (nth, true));
    let nth: u64 = nth.parse().ok().filter(|nth| *nth > 0).ok_or_else(expected)?;
    if symbol != "*" && cuda_abi::by_symbol(symbol).is_none() {
        return Err(format!("there is no entry point {symbol:?}"));
    }
    let action = if action == "lose-device" {
        Action::LoseDevice
    } else if action == "hang" {
        Action::Hang
    } else if action == "crash" {
        Action::Crash
    } else if let Some(time_ms) = action.strip_prefix("delay:") {
        Action::Delay(Duration::from_millis(time_ms.parse().map_err(|_| expected())?))
    } else {
        Action::Fail(proc_address::error_by_name_or_number(action).ok_or_else(|| {
            format!("{action:?} is neither an error of the driver nor delay:MILLISECONDS, hang, crash or lose-device")
        })?)
    };
    Ok(Rule { symbol: symbol.into(), nth, and_later, action, calls: AtomicU64::new(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_parsed() {
        let rules = parse("cuMemAlloc_v2:3=CUDA_ERROR_OUT_OF_MEMORY; *:1+=delay:5;cuInit:2=999").unwrap();
        assert_eq!(rules[0].symbol, "cuMemAlloc_v2");
        assert_eq!((rules[0].nth, rules[0].and_later), (3, false));
        assert_eq!(rules[0].action, Action::Fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!((rules[1].nth, rules[1].and_later), (1, true));
        assert_eq!(rules[1].action, Action::Delay(Duration::from_millis(5)));
        assert_eq!(rules[2].action, Action::Fail(CUresult::CUDA_ERROR_UNKNOWN));
    }

    #[test]
    fn bad_rules_are_told() {
        for bad in [
            "cuMemAlloc_v2",
            "cuMemAlloc_v2:0=999",
            "cuNothing:1=999",
            "cuInit:1=FOO",
            "cuInit:x=999",
            "cuInit:1++=999",
            "cuInit:1=0",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rule_counts_the_calls_of_its_symbol() {
        let rules = parse("cuInit:2=999;cuInit:2+=801;*:3=2").unwrap();
        let calls = ["cuInit", "cuDeviceGet", "cuInit", "cuInit"];
        let due: Vec<Vec<bool>> =
            calls.iter().map(|symbol| rules.iter().map(|rule| rule.is_due(symbol)).collect()).collect();
        assert_eq!(
            due,
            [[false, false, false], [false, false, false], [true, true, true], [false, true, false]]
        );
    }
}
