//! Lengths of time in messages.

use std::time::Duration;

/// `3m 20s`; below ten seconds with tenths.
#[must_use]
pub fn span(time: Duration) -> String {
    if time < Duration::from_secs(10) {
        return format!("{:.1} s", time.as_secs_f64());
    }
    humantime::format_duration(Duration::from_secs(time.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_times_have_tenths() {
        assert_eq!(span(Duration::from_millis(1234)), "1.2 s");
        assert_eq!(span(Duration::from_millis(200_900)), "3m 20s");
    }
}
