//! What the environment says about the simulated machine, read once by `cuInit`.

use std::path::PathBuf;
use std::time::Duration;

/// The simulated machine.
#[derive(Debug, Clone)]
pub struct Config {
    /// `SIMCUDA_DEVICES`: how many devices there are.
    pub devices: usize,
    /// `SIMCUDA_MEMORY`: memory of each device.
    pub memory_bytes: u64,
    /// `SIMCUDA_CONTEXT_MEMORY`: memory of the device that a context takes.
    pub context_bytes: u64,
    /// `SIMCUDA_CONTEXT_MS`: how long it takes to make a context, and to make it again in a restore.
    pub context_time: Duration,
    /// `SIMCUDA_COPY_GBPS`: speed of a copy over the bus in 10^9 bytes per second; unset: as fast as it goes.
    pub copy_bytes_per_s: Option<f64>,
    /// `SIMCUDA_DIR`: where the devices' memory lies, shared by all processes that name the same directory.
    pub directory: PathBuf,
    /// `SIMCUDA_PERSISTENCE`: whether the devices stay initialised while no process has them open.
    pub is_persistent: bool,
    /// `SIMCUDA_KILL_RUINS`: whether killing a restored process ruins the devices.
    pub kill_ruins: bool,
    /// `SIMCUDA_MIG`: whether each device is an instance of a GPU in MIG mode.
    pub is_mig: bool,
    /// `SIMCUDA_MPS`: whether contexts are shared by MPS.
    pub is_mps: bool,
    /// `SIMCUDA_THREADS`: how many host threads run a kernel's blocks.
    pub threads: usize,
    /// `SIMCUDA_SWITCH_TIMEOUT_MS`: how long a kernel may keep another process waiting, see [`crate::Turns`].
    pub switch_timeout: Duration,
    /// `SIMCUDA_JITTER`: seed of the random delays before each piece of asynchronous work.
    pub jitter: Option<u64>,
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    /// Says which variable has which bad value and what is expected.
    pub fn from_environment() -> Result<Self, String> {
        // SAFETY: geteuid has no preconditions.
        let user = unsafe { libc::geteuid() };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            devices: variable("SIMCUDA_DEVICES", 1, |text| text.parse().ok().filter(|n| *n <= 64))?,
            memory_bytes: variable("SIMCUDA_MEMORY", 4 << 30, parse_bytes)?,
            context_bytes: variable("SIMCUDA_CONTEXT_MEMORY", 0, parse_bytes)?,
            context_time: variable("SIMCUDA_CONTEXT_MS", Duration::ZERO, |text| {
                text.parse().ok().map(Duration::from_millis)
            })?,
            copy_bytes_per_s: variable("SIMCUDA_COPY_GBPS", None, |text| {
                text.parse::<f64>().ok().filter(|speed| *speed > 0.0).map(|speed| Some(speed * 1e9))
            })?,
            directory: std::env::var_os("SIMCUDA_DIR")
                .map_or_else(|| PathBuf::from(format!("/dev/shm/simcuda-{user}")), PathBuf::from),
            is_persistent: variable("SIMCUDA_PERSISTENCE", false, parse_switch)?,
            kill_ruins: variable("SIMCUDA_KILL_RUINS", false, parse_switch)?,
            is_mig: variable("SIMCUDA_MIG", false, parse_switch)?,
            is_mps: variable("SIMCUDA_MPS", false, parse_switch)?,
            threads: variable("SIMCUDA_THREADS", cores, |text| text.parse().ok().filter(|n| *n > 0))?,
            switch_timeout: variable("SIMCUDA_SWITCH_TIMEOUT_MS", Duration::from_secs(5), |text| {
                text.parse().ok().map(Duration::from_millis)
            })?,
            jitter: variable("SIMCUDA_JITTER", None, |text| text.parse().ok().map(Some))?,
        })
    }
}

/// The value of a variable, or the default.
pub(crate) fn variable<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    match std::env::var(name) {
        Err(std::env::VarError::NotPresent) => Ok(default),
        Err(std::env::VarError::NotUnicode(text)) => Err(format!("{name}: not a text: {text:?}")),
        Ok(text) => parse(text.trim()).ok_or_else(|| format!("{name}: cannot use the value {text:?}")),
    }
}

/// `0` or `1`.
fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// `"512MiB"`, `"2GiB"` or a plain number of bytes.
pub(crate) fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::parse_bytes;

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("64MiB"), Some(64 << 20));
        assert_eq!(parse_bytes("2 GiB"), Some(2 << 30));
        assert_eq!(parse_bytes("123"), Some(123));
        assert_eq!(parse_bytes("12XB"), None);
        assert_eq!(parse_bytes("99999999999GiB"), None);
    }
}
