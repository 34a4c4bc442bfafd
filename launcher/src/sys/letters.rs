//! Characters that a terminal does not show as themselves.

/// Whether a character is one of control, or changes the direction of the text after it (Unicode, Bidi_Control): a text of
/// somebody else could show what it is not.
#[must_use]
pub fn is_control(letter: char) -> bool {
    letter.is_control()
        || matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::is_control;

    #[test]
    fn texts_cannot_hide_what_they_are() {
        let kept = |text: &str| text.chars().filter(|letter| !is_control(*letter)).collect::<String>();
        assert_eq!(kept("\u{202e}exe.\u{2066}txt\u{1b}[2J\u{7f}"), "exe.txt[2J");
        assert_eq!(kept("naïve שלום 🦀 \u{200d}"), "naïve שלום 🦀 \u{200d}");
    }
}
