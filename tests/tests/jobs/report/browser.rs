//! The page in a real browser: Chromium, without a window and without a network, in light and dark, wide and narrow.
//! Screenshots are kept in `target/tests/report` to be looked at.

use ckpt_run_tests::workspace;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The variable with the browser; it is set with `--full`.
const BROWSER: &str = "CKPT_TEST_CHROMIUM";
const MEASURE: &str = include_str!("measure_page.js");
/// The page forbids scripts. The copy that is measured does not.
const POLICY: &str = r#"<meta http-equiv="Content-Security-Policy""#;
const HEIGHT: u32 = 3000;
/// The narrowest window of the browser, in pixels.
const NARROW: u32 = 500;

/// The page `path` is readable. It has `charts` charts or more, and these classes of time.
pub fn check(path: &Path, charts: usize, classes: usize) {
    let page = fs::read_to_string(path).unwrap();
    assert!(page.contains(POLICY) && !page.contains("<script"));
    let dir = path.parent().unwrap();
    let copy = dir.join("measured.html");
    let page = page.replacen(POLICY, "<meta name=\"policy\"", 1);
    fs::write(&copy, page.replacen("</body>", &format!("<script>{MEASURE}</script></body>"), 1)).unwrap();
    let pictures = workspace().join("target/tests/report");
    fs::create_dir_all(&pictures).unwrap();
    for (scheme, width) in [("light", 1200), ("dark", 1200), ("light", NARROW)] {
        let is_dark = scheme == "dark";
        let said = browse(dir, width, is_dark, &["--dump-dom"], &copy);
        let (_, measured) = said.split_once(r#"<pre id="measured">"#).unwrap_or_else(|| panic!("{said}"));
        let measured = measured.split_once("</pre>").unwrap().0.replace("&lt;", "<");
        let measured: Value =
            serde_json::from_str(&measured.replace("&gt;", ">").replace("&amp;", "&")).unwrap();
        let what = format!("{scheme}, {width} pixels: {measured:#}");
        assert_eq!(measured["dark"], is_dark, "{what}");
        assert_eq!(measured["width"], width, "{what}");
        assert!(measured["texts"].as_u64().unwrap() > 30, "{what}");
        for nothing in ["faint", "cut"] {
            assert_eq!(measured[nothing].as_array().unwrap().len(), 0, "{nothing} texts, {what}");
        }
        assert_eq!(
            (measured["loaded"].as_u64(), measured["overflow"].as_i64()),
            (Some(0), Some(0)),
            "{what}"
        );
        let found = measured["charts"].as_array().unwrap();
        assert!(found.len() >= charts, "{what}");
        for chart in found {
            assert!(
                chart["width"].as_f64().unwrap() > 200.0 && chart["height"].as_f64().unwrap() > 20.0,
                "{what}"
            );
        }
        assert_eq!(found[0]["colors"].as_u64(), Some(classes as u64), "{what}");
        let legend: BTreeSet<_> =
            measured["legend"].as_array().unwrap().iter().take(classes).map(Value::to_string).collect();
        assert_eq!(legend.len(), classes, "colors that differ, {what}");

        let picture = pictures.join(format!("{scheme}-{width}.png"));
        let _ = fs::remove_file(&picture);
        browse(dir, width, is_dark, &[&format!("--screenshot={}", picture.display())], path);
        assert!(fs::read(&picture).unwrap().starts_with(b"\x89PNG"), "{what}");
    }
}

/// Whether there is a browser.
pub fn is_there() -> bool {
    std::env::var_os(BROWSER).is_some()
}

/// Opens a page without a network; returns what the browser prints.
fn browse(dir: &Path, width: u32, is_dark: bool, options: &[&str], page: &Path) -> String {
    let mut command = Command::new("unshare");
    command.args(["--net", "timeout", "120"]).arg(std::env::var_os(BROWSER).unwrap());
    // Root has no sandbox.
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]);
    command
        .arg(format!("--window-size={width},{HEIGHT}"))
        .arg(format!("--user-data-dir={}", dir.join("profile").display()));
    // Blink's PreferredColorScheme: 0 is dark, 1 is light.
    command.arg(format!("--blink-settings=preferredColorScheme={}", u8::from(!is_dark)));
    command.args(options).arg(format!("file://{}", page.display()));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
