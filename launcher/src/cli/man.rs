//! The manual page.

use crate::cli::args::{self, EXAMPLES, EXIT_CODES, HOW_IT_WORKS};
use std::io::{self, Write};

/// Writes the manual page of ckpt-run, in roff. All commands are on this page.
///
/// # Errors
/// When it cannot be written.
pub fn write(out: &mut dyn Write) -> io::Result<()> {
    let command = args::command();
    let man = clap_mangen::Man::new(command.clone());
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    writeln!(out, ".SH COMMANDS")?;
    for ours in command.get_subcommands() {
        let about = ours.get_about().map(ToString::to_string).unwrap_or_default();
        writeln!(out, ".TP\n\\fB{}\\fR\n{}", escaped(ours.get_name()), escaped(&about))?;
        let options = ours.get_arguments().filter_map(|one| Some((one.get_long()?, one)));
        for (name, option) in options.filter(|(_, one)| !one.is_global_set() && !one.is_hide_set()) {
            let value = match option.get_value_names() {
                Some([value, ..]) if option.get_action().takes_values() => format!(" {value}"),
                _ => String::new(),
            };
            let help = option.get_help().map(ToString::to_string).unwrap_or_default();
            writeln!(
                out,
                ".RS\n.TP\n\\fB{}\\fR\n{}\n.RE",
                escaped(&format!("--{name}{value}")),
                escaped(&help)
            )?;
        }
    }
    man.render_options_section(out)?;
    literal(out, "EXAMPLES", EXAMPLES)?;
    literal(out, "HOW IT WORKS", HOW_IT_WORKS)?;
    literal(out, "EXIT STATUS", EXIT_CODES)?;
    man.render_version_section(out)
}

/// A section whose lines stay as they are.
fn literal(out: &mut dyn Write, title: &str, text: &str) -> io::Result<()> {
    writeln!(out, ".SH \"{title}\"\n.nf")?;
    text.lines().try_for_each(|line| writeln!(out, "{}", escaped(line)))?;
    writeln!(out, ".fi")
}

/// A line that roff prints as it is.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_page_has_all_sections_and_no_other_page() {
        let mut page = Vec::new();
        write(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        for section in ["COMMANDS", "OPTIONS", "\"EXAMPLES\"", "\"EXIT STATUS\""] {
            assert!(page.contains(&format!(".SH {section}\n")), "{section}: {page}");
        }
        assert!(
            !page.contains("ckpt\\-run\\-checkpoint(1)") && page.contains("\\fBcheckpoint\\fR"),
            "{page}"
        );
        for option in ["\\-\\-whole\\-job", "\\-\\-watch", "\\-\\-dry\\-run"] {
            assert!(page.contains(&format!("\\fB{option}")), "{option}: {page}");
        }
        assert_eq!(escaped(".a-b\\"), "\\&.a\\-b\\e");
    }
}
