//! Fault injection by rules: `cuMemAlloc_v2:3=CUDA_ERROR_OUT_OF_MEMORY;cuInit:1=hang`.
//!
//! Each rule is `SYMBOL:N=ACTION`: the Nth call of that symbol in this process, or with `N+` the Nth and every
//! later one; `*` is every symbol. An action is `delay:MILLISECONDS`, `hang` (the call never returns), `crash` (the process
//! aborts), or an effect of the library's own.
//!
//! An environment variable has rules. Another one, whose name ends with `_FILE`, names a file with rules: they apply while
//! the file exists, and calls count from its creation. It has to be put in place by renaming, never written in place. The
//! symbol of each call that such a rule hits is added to the file of the same name with the extension `hits`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What the rules of a library may name.
#[derive(Debug, Clone, Copy)]
pub struct Names<E> {
    /// The environment variable with rules.
    pub variable: &'static str,
    /// Whether the library has such a call.
    pub is_call: fn(&str) -> bool,
    /// The library's own effect of this name.
    pub effect: fn(&str) -> Option<E>,
    /// What those effects are, for a message.
    pub effects: &'static str,
}

/// The faults of a library.
#[derive(Debug)]
pub struct Faults<E> {
    names: Names<E>,
    rules: Vec<Rule<E>>,
    file: Option<PathBuf>,
    from_file: Mutex<Option<FromFile<E>>>,
}

#[derive(Debug)]
struct Rule<E> {
    symbol: String,
    nth: u64,
    and_later: bool,
    action: Action<E>,
    calls: AtomicU64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Action<E> {
    Own(E),
    Delay(Duration),
    Hang,
    Crash,
}

/// The rules of a file, with what distinguishes it from the previous file.
#[derive(Debug)]
struct FromFile<E> {
    version: (u64, i64, i64),
    rules: Arc<Vec<Rule<E>>>,
}

impl<E: Copy> Faults<E> {
    /// The faults of the environment.
    pub fn from_environment(names: Names<E>) -> Self {
        let text = std::env::var(names.variable).unwrap_or_default();
        let rules = names.parsed(names.variable, &text);
        let file = std::env::var_os(format!("{}_FILE", names.variable)).map(PathBuf::from);
        Self { names, rules, file, from_file: Mutex::new(None) }
    }

    /// Called before each call. Returns the library's own effects that are due.
    pub fn before(&self, symbol: &str) -> Vec<E> {
        let from_file = self.rules_of_file();
        let in_file = from_file.iter().flat_map(|rules| rules.iter());
        let rules = self.rules.iter().map(|rule| (rule, false)).chain(in_file.map(|rule| (rule, true)));
        let mut effects = Vec::new();
        // Each rule counts the call, whatever another one makes of it.
        for (rule, is_from_file) in rules.filter(|(rule, _)| rule.is_due(symbol)) {
            if is_from_file {
                self.note_hit(symbol);
            }
            match rule.action {
                Action::Own(effect) => effects.push(effect),
                Action::Delay(time) => std::thread::sleep(time),
                Action::Hang => loop {
                    std::thread::park();
                },
                Action::Crash => std::process::abort(),
            }
        }
        effects
    }

    /// The rules of the file as it is now.
    fn rules_of_file(&self) -> Option<Arc<Vec<Rule<E>>>> {
        let path = self.file.as_ref()?;
        let mut known = self.from_file.lock().unwrap_or_else(PoisonError::into_inner);
        let Ok(meta) = fs::metadata(path) else {
            *known = None;
            return None;
        };
        let version = (meta.ino(), meta.ctime(), meta.ctime_nsec());
        if let Some(known) = known.as_ref().filter(|known| known.version == version) {
            return Some(Arc::clone(&known.rules));
        }
        let text = fs::read_to_string(path).unwrap_or_default();
        let from = format!("{}_FILE", self.names.variable);
        let rules = Arc::new(self.names.parsed(&from, text.trim_end()));
        *known = Some(FromFile { version, rules: Arc::clone(&rules) });
        Some(rules)
    }

    fn note_hit(&self, symbol: &str) {
        let Some(path) = self.file.as_ref() else { return };
        let noted = fs::File::options().append(true).create(true).open(path.with_extension("hits"));
        let noted = noted.and_then(|mut file| file.write_all(format!("{symbol}\n").as_bytes()));
        if let Err(error) = noted {
            eprintln!("{}_FILE: {error}", self.names.variable);
        }
    }
}

impl<E> Rule<E> {
    /// Counts a call; whether it is one of the rule's.
    fn is_due(&self, symbol: &str) -> bool {
        if self.symbol != "*" && self.symbol != symbol {
            return false;
        }
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        call == self.nth || (call > self.nth && self.and_later)
    }
}

impl<E> Names<E> {
    /// Rules with a mistake in them must not pass for faults that were survived.
    fn parsed(&self, from: &str, text: &str) -> Vec<Rule<E>> {
        self.parse(text).unwrap_or_else(|message| {
            eprintln!("{from}: {message}");
            std::process::exit(2);
        })
    }

    fn parse(&self, text: &str) -> Result<Vec<Rule<E>>, String> {
        let rules = text.split(';').map(str::trim).filter(|rule| !rule.is_empty());
        rules.map(|rule| self.parse_rule(rule)).collect()
    }

    fn parse_rule(&self, text: &str) -> Result<Rule<E>, String> {
        let expected = || format!("{text:?} is not SYMBOL:N=ACTION");
        let (call, action) = text.split_once('=').ok_or_else(expected)?;
        let (symbol, nth) = call.split_once(':').ok_or_else(expected)?;
        let (nth, and_later) = nth.strip_suffix('+').map_or((nth, false), |nth| (nth, true));
        let nth: u64 = nth.parse().ok().filter(|nth| *nth > 0).ok_or_else(expected)?;
        if symbol != "*" && !(self.is_call)(symbol) {
            return Err(format!("there is no entry point {symbol:?}"));
        }
        let action = match (action, action.strip_prefix("delay:")) {
            ("hang", _) => Action::Hang,
            ("crash", _) => Action::Crash,
            (_, Some(time_ms)) => {
                Action::Delay(Duration::from_millis(time_ms.parse().map_err(|_| expected())?))
            }
            _ => Action::Own((self.effect)(action).ok_or_else(|| {
                format!("{action:?} is neither {} nor delay:MILLISECONDS, hang or crash", self.effects)
            })?),
        };
        Ok(Rule { symbol: symbol.into(), nth, and_later, action, calls: AtomicU64::new(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: Names<u32> = Names {
        variable: "FAULT",
        is_call: |symbol| ["cuInit", "cuDeviceGet"].contains(&symbol),
        effect: |text| text.parse().ok().filter(|error| *error > 0),
        effects: "an error",
    };

    #[test]
    fn rules_are_parsed() {
        let rules = NAMES.parse("cuInit:3=2; *:1+=delay:5;cuInit:2=hang;cuDeviceGet:1=crash").unwrap();
        assert_eq!(rules[0].symbol, "cuInit");
        assert_eq!((rules[0].nth, rules[0].and_later), (3, false));
        assert_eq!(rules[0].action, Action::Own(2));
        assert_eq!((rules[1].nth, rules[1].and_later), (1, true));
        assert_eq!(rules[1].action, Action::Delay(Duration::from_millis(5)));
        assert_eq!((rules[2].action, rules[3].action), (Action::Hang, Action::Crash));
    }

    #[test]
    fn bad_rules_are_told() {
        for bad in [
            "cuInit",
            "cuInit:0=9",
            "cuNothing:1=9",
            "cuInit:1=FOO",
            "cuInit:x=9",
            "cuInit:1++=9",
            "cuInit:1=0",
        ] {
            assert!(NAMES.parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rule_counts_the_calls_of_its_symbol() {
        let rules = NAMES.parse("cuInit:2=999;cuInit:2+=801;*:3=2").unwrap();
        let calls = ["cuInit", "cuDeviceGet", "cuInit", "cuInit"];
        let due: Vec<Vec<bool>> =
            calls.iter().map(|symbol| rules.iter().map(|rule| rule.is_due(symbol)).collect()).collect();
        assert_eq!(
            due,
            [[false, false, false], [false, false, false], [true, true, true], [false, true, false]]
        );
    }
}
