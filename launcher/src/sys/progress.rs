//! Progress bars of long operations, on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Shorter operations show no bar.
const MIN_BYTES: u64 = 256 << 20;

/// Set by [`hide`].
static IS_HIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on, no bar is shown (`--quiet`, messages as JSON).
pub fn hide() {
    IS_HIDDEN.store(true, Ordering::Relaxed);
}

/// A progress bar in bytes: operation, bytes, rate, time left.
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// Starts a bar, which is drawn on stderr if that is a terminal. The total may be told later: [`Self::set`].
    #[must_use]
    pub fn new(operation: &'static str, total_bytes: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::hidden())
            .with_message(operation);
        let style = "ckpt-run: {msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(500));
        let bar = Self { bar };
        bar.show(total_bytes);
        bar
    }

    fn show(&self, total_bytes: u64) {
        let is_wanted = total_bytes >= MIN_BYTES && !IS_HIDDEN.load(Ordering::Relaxed);
        if is_wanted && self.bar.is_hidden() {
            self.bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
        }
    }

    /// Adds processed bytes.
    pub fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Sets processed and total bytes.
    pub fn set(&self, done_bytes: u64, total_bytes: u64) {
        self.show(total_bytes);
        self.bar.set_length(total_bytes);
        self.bar.set_position(done_bytes);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
