//! Hides secrets in command lines: values of options and assignments whose names suggest a secret, and users and passwords
//! in URLs. A secret without such a mark is not found.

/// Shown instead of a secret.
pub const HIDDEN: &str = "***";

/// Endings of name parts that mark a secret. `tokens` and `tokenizer` are no secrets.
const SECRET_ENDS: [&str; 9] =
    ["token", "secret", "password", "passwd", "passphrase", "apikey", "accesskey", "secretkey", "privatekey"];
/// Whole name parts that mark a secret.
const SECRET_PARTS: [&str; 9] =
    ["pwd", "pass", "auth", "authorization", "credential", "credentials", "secrets", "signature", "sig"];
/// Words that make a following `key` a secret.
const SECRET_KEYS: [&str; 9] =
    ["api", "access", "secret", "private", "account", "session", "signing", "encryption", "sas"];
/// Words that mark the value as a location and not as the secret.
const LOCATIONS: [&str; 4] = ["file", "path", "dir", "directory"];
/// Words between `Authorization:` and the secret.
const SCHEMES: [&str; 3] = ["bearer", "basic", "token"];

/// The arguments without secrets.
#[must_use]
pub fn hidden_in(argv: &[String]) -> Vec<String> {
    let mut is_next = false;
    let shown = argv.iter().map(|argument| {
        if is_next && !argument.starts_with("--") {
            is_next = false;
            return HIDDEN.to_owned();
        }
        is_next = false;
        // The whole value.
        let name = argument.find(['=', ':']).and_then(|at| secret_name(&argument[..=at]));
        if let Some(name) = name.filter(|name| !name.starts_with(is_separator)) {
            return format!("{name}{HIDDEN}");
        }
        let shown = in_text(argument, &mut is_next);
        // A word inside an argument does not affect the next argument.
        is_next &= argument.starts_with('-') && !argument.contains(char::is_whitespace);
        shown
    });
    shown.collect()
}

/// A shell command, or another text, without secrets.
#[must_use]
pub fn hidden_in_text(text: &str) -> String {
    in_text(text, &mut false)
}

fn in_text(text: &str, is_next: &mut bool) -> String {
    let text = without_users(text);
    let mut shown = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        if is_separator(first) {
            shown.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let word = &rest[..word_length(rest)];
        shown.push_str(&in_word(word, is_next));
        rest = &rest[word.len()..];
    }
    shown
}

fn is_separator(letter: char) -> bool {
    letter.is_whitespace() || ";|&()<>,?{}[]".contains(letter)
}

/// The length up to the next separator outside of quotes.
fn word_length(text: &str) -> usize {
    let mut quote = None;
    for (at, letter) in text.char_indices() {
        match quote {
            Some(open) if open == letter => quote = None,
            None if letter == '\'' || letter == '"' => quote = Some(letter),
            None if is_separator(letter) => return at,
            _ => {}
        }
    }
    text.len()
}

fn in_word(word: &str, is_next: &mut bool) -> String {
    let bare = word.trim_matches(['\'', '"']);
    if *is_next && !bare.starts_with("--") {
        *is_next = SCHEMES.contains(&bare.to_lowercase().as_str());
        return if *is_next { word.to_owned() } else { HIDDEN.to_owned() };
    }
    *is_next = false;
    let quote = word.chars().next().filter(|&first| first == '\'' || first == '"');
    if let Some(name) = secret_name(word) {
        *is_next = name.len() == word.len();
        // A quote that is open in the name is closed after it.
        let is_open = |quote: &char| name.matches(*quote).count() == 1 && word.ends_with(*quote);
        let closing = quote.filter(is_open).map(String::from).unwrap_or_default();
        return if *is_next { word.to_owned() } else { format!("{name}{HIDDEN}{closing}") };
    }
    // A quoted text: a command in itself.
    if let Some(quote) = quote
        && let Some(inner) = word[1..].strip_suffix(quote)
        && inner.contains(is_separator)
    {
        let inner = in_text(inner, is_next);
        *is_next = false;
        return format!("{quote}{inner}{quote}");
    }
    *is_next = bare.starts_with('-') && is_secret(bare);
    word.to_owned()
}

/// The beginning of the word up to and including the `=` or `:` after the name of a secret.
fn secret_name(word: &str) -> Option<&str> {
    let mut from = 0;
    for (at, letter) in word.char_indices() {
        let ends_name = letter == '=' || (letter == ':' && !word[at + 1..].starts_with("//"));
        if !ends_name {
            continue;
        }
        let name = &word[from..at];
        if is_secret(name) && !name.contains(char::is_whitespace) {
            return Some(&word[..=at]);
        }
        from = at + 1;
    }
    None
}

/// Whether this is the name of a secret, in any spelling: `--api-key`, `HF_TOKEN`, `db.password`.
fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    let parts: Vec<&str> =
        name.split(|letter: char| !letter.is_alphanumeric()).filter(|part| !part.is_empty()).collect();
    if parts.last().is_some_and(|last| LOCATIONS.contains(last)) {
        return false;
    }
    let is_part =
        |part: &&str| SECRET_PARTS.contains(part) || SECRET_ENDS.iter().any(|end| part.ends_with(end));
    parts.iter().any(is_part)
        || parts.windows(2).any(|pair| pair[1] == "key" && SECRET_KEYS.contains(&pair[0]))
}

/// Hides the part before `@` in URLs.
fn without_users(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("://") {
        let (before, after) = rest.split_at(at + 3);
        shown.push_str(before);
        let ends = |letter: char| letter == '/' || letter.is_whitespace() || "'\"".contains(letter);
        let host = &after[..after.find(ends).unwrap_or(after.len())];
        rest = match host.rfind('@') {
            Some(user) => {
                shown.push_str(HIDDEN);
                &after[user..]
            }
            None => after,
        };
    }
    shown.push_str(rest);
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(argv: &[&str]) -> String {
        hidden_in(&argv.iter().map(|&argument| argument.to_owned()).collect::<Vec<_>>()).join(" ")
    }

    #[test]
    fn options_and_assignments_that_name_secrets() {
        for (argv, wanted) in [
            (vec!["t.py", "--token", "x1", "--lr", "1"], "t.py --token *** --lr 1"),
            (vec!["t.py", "--api-key=x1", "-v"], "t.py --api-key=*** -v"),
            (vec!["t.py", "--password=x1 x2, x3"], "t.py --password=***"),
            (vec!["t.py", "--hf_token", "x1 x2"], "t.py --hf_token ***"),
            (
                vec!["env", "HF_TOKEN=x1", "WANDB_API_KEY=x1", "t.py"],
                "env HF_TOKEN=*** WANDB_API_KEY=*** t.py",
            ),
            (vec!["t.py", "+db.password=x1", "lr=0.1"], "t.py +db.password=*** lr=0.1"),
            (vec!["t.py", "--config", "lr=0.1,token=x1"], "t.py --config lr=0.1,token=***"),
            (vec!["t.py", "--json", r#"{"secret":"x1","a":2}"#], r#"t.py --json {"secret":***,"a":2}"#),
            (vec!["t.py", "--auth", "--fast"], "t.py --auth --fast"),
            (vec!["t.py", "--env=AWS_SECRET_ACCESS_KEY=x1"], "t.py --env=AWS_SECRET_ACCESS_KEY=***"),
        ] {
            assert_eq!(shown(&argv), wanted);
        }
    }

    #[test]
    fn addresses_and_headers() {
        for (argv, wanted) in [
            (vec!["t.py", "redis://me:x1@host:6379/0"], "t.py redis://***@host:6379/0"),
            (vec!["t.py", "--db=postgres://me:x1@host/db"], "t.py --db=postgres://***@host/db"),
            (vec!["get", "https://host/a?b=1&sig=x1&c=2"], "get https://host/a?b=1&sig=***&c=2"),
            (vec!["get", "-H", "Authorization: Bearer x1"], "get -H Authorization:***"),
            (vec!["get", "-H", "X-Api-Key: x1", "b"], "get -H X-Api-Key:*** b"),
        ] {
            assert_eq!(shown(&argv), wanted);
        }
    }

    #[test]
    fn commands_within_arguments() {
        assert_eq!(
            shown(&["sh", "-c", "export TOKEN='x1 x1'; t.py --password x1 --lr 1 'a b'"]),
            "sh -c export TOKEN=***; t.py --password *** --lr 1 'a b'"
        );
        assert_eq!(
            hidden_in_text("curl -H \"Authorization: Bearer x1\" https://u:x1@h/ && test -e f"),
            "curl -H \"Authorization:***\" https://***@h/ && test -e f"
        );
        assert_eq!(hidden_in_text("echo Authorization: Bearer x1 end"), "echo Authorization: Bearer *** end");
    }

    #[test]
    fn other_values_stay_readable() {
        let plain = [
            "torchrun",
            "--nproc_per_node=8",
            "train.py",
            "--max-tokens",
            "512",
            "--tokenizer=gpt2",
            "--token-file",
            "/run/x",
            "--key",
            "value",
            "--data=https://host:80/a?b=c",
            "it's",
            "ünïcode",
            "",
            "--out=s3://bucket/prefix",
        ];
        assert_eq!(shown(&plain), plain.join(" "));
    }
}
