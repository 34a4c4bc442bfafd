//! Prometheus metrics of a running job (`--metrics`), computed from the status at each scrape.

use crate::job::status::{SharedStatus, unix_ms};
use crate::job::times::{self, Class, Times};
use crate::sys::error::bad_input;
use anyhow::{Context, Result, anyhow};
use ckpt_protocol::control::{JobStatus, Phase};
use ckpt_snapshot::JobDir;
use prometheus::{CounterVec, GaugeVec, Opts, Registry, TextEncoder};
use server::{Answer, Request, Server};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::SystemTime;

mod server;

/// Listens at `address`.
///
/// # Errors
/// Bad input: the address is in use, or is not an address of this machine.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|error| {
        bad_input(anyhow!(
            "cannot serve metrics at {address}: {error}. Give --metrics a free port (0 chooses one) and an address of this machine"
        ))
    })
}

/// Serves the metrics of `status` and of the job's journal until the server is dropped.
///
/// # Errors
/// When no thread can be started.
pub fn serve(listener: TcpListener, status: &Arc<SharedStatus>, job: &JobDir) -> Result<Server> {
    let failed = "cannot serve metrics. The job runs without --metrics too";
    let address = listener.local_addr().context(failed)?;
    let (status, job) = (Arc::clone(status), job.clone());
    let server = Server::start(listener, move |request| answer(request, &status, &job)).context(failed)?;
    tracing::info!("metrics are at http://{address}/metrics");
    Ok(server)
}

fn answer(request: &Request, status: &SharedStatus, job: &JobDir) -> Answer {
    let (status, text) = match (request.method, request.path) {
        ("GET" | "HEAD", "/metrics") => {
            // A journal that cannot be read costs its part of the metrics only.
            let times = times::of_job(job, true).ok().flatten();
            match text(&status.snapshot(), times.as_ref(), unix_ms(SystemTime::now())) {
                Ok(text) => ("200 OK", text),
                Err(error) => ("500 Internal Server Error", format!("cannot encode the metrics: {error}\n")),
            }
        }
        ("GET" | "HEAD", _) => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "metrics can only be read\n".to_owned()),
    };
    Answer { status, text }
}

/// All metrics of one job.
struct Page<'a> {
    registry: Registry,
    job: &'a str,
}

impl Page<'_> {
    /// Adds a counter with one row per value of the label.
    fn counter(&self, name: &str, help: &str, label: &str, rows: &[(&str, f64)]) -> prometheus::Result<()> {
        let labels = if label.is_empty() { vec!["job"] } else { vec!["job", label] };
        let counter = CounterVec::new(Opts::new(name, help), &labels)?;
        for &(row, value) in rows {
            // A count is never negative, but a duration may be after a clock jump.
            counter.get_metric_with_label_values(&[self.job, row][..labels.len()])?.inc_by(value.max(0.0));
        }
        self.registry.register(Box::new(counter))
    }

    /// Adds a gauge with one row per value of the label.
    fn gauge(&self, name: &str, help: &str, label: &str, rows: &[(&str, f64)]) -> prometheus::Result<()> {
        let labels = if label.is_empty() { vec!["job"] } else { vec!["job", label] };
        let gauge = GaugeVec::new(Opts::new(name, help), &labels)?;
        for &(row, value) in rows {
            gauge.get_metric_with_label_values(&[self.job, row][..labels.len()])?.set(value);
        }
        self.registry.register(Box::new(gauge))
    }
}

/// The metrics in Prometheus' text format.
fn text(status: &JobStatus, times: Option<&Times>, now_unix_ms: u64) -> prometheus::Result<String> {
    let page = Page { registry: Registry::new(), job: &status.job };
    if let Some(times) = times {
        time(&page, times)?;
    }
    snapshots(&page, status, now_unix_ms)?;
    let restarts = f64::from(status.restarts);
    page.counter("ckpt_run_restarts_total", "Restarts of the job by this launcher.", "", &[("", restarts)])?;
    let running = f64::from(u8::from(status.restart_s.is_none()));
    let help = "1 while the job is running, 0 while it waits for its restart.";
    page.gauge("ckpt_run_job_running", help, "", &[("", running)])?;
    let is = |phase| f64::from(u8::from(status.progress.phase == phase));
    let phases = [("idle", is(Phase::Idle)), ("dump", is(Phase::Dump)), ("persist", is(Phase::Persist))];
    let help = "1 for the current phase: idle, dump (the job is paused), or persist (a snapshot is stored).";
    page.gauge("ckpt_run_phase", help, "phase", &phases)?;
    late_ranks(&page, status)?;
    if let Some(memory) = &status.device_memory {
        let help = "Device memory of the job at its newest checkpoint.";
        page.gauge("ckpt_run_device_memory_bytes", help, "", &[("", memory.bytes as f64)])?;
        let help = "Host memory that the copy of device memory takes between checkpoints, by what it holds (--mirror).";
        let rows = [(memory.mirror.as_str(), memory.mirror_bytes as f64)];
        page.gauge("ckpt_run_mirror_bytes", help, "mode", &rows)?;
    }
    if let Some(uploads) = &status.uploads {
        let rows = [("uploaded", uploads.uploaded as f64), ("failed", uploads.failed as f64)];
        let help = "Uploads of snapshots to the object store by this launcher.";
        page.counter("ckpt_run_uploads_total", help, "result", &rows)?;
        let help = "Bytes added to the object store by uploads.";
        page.counter("ckpt_run_upload_bytes_total", help, "", &[("", uploads.stored_bytes as f64)])?;
        let now = f64::from(u8::from(uploads.uploading.is_some()));
        page.gauge("ckpt_run_uploading", "1 while a snapshot is being uploaded.", "", &[("", now)])?;
    }
    TextEncoder::new().encode_to_string(&page.registry.gather())
}

fn late_ranks(page: &Page<'_>, status: &JobStatus) -> prometheus::Result<()> {
    let all = &status.late_ranks;
    let hanging = all.iter().filter(|late| late.hangs()).count();
    let rows = [("hangs", hanging as f64), ("works", (all.len() - hanging) as f64)];
    let help =
        "Ranks of NCCL for which others have waited for 30 s: that do nothing (hangs), or are slow (works).";
    page.gauge("ckpt_run_late_ranks", help, "state", &rows)?;
    let longest_s = all.iter().map(|late| late.late_s).fold(0.0, f64::max);
    let help = "For how long ranks have waited for a late rank.";
    page.gauge("ckpt_run_late_rank_wait_seconds", help, "", &[("", longest_s)])
}

/// Gauges, not counters: a hang is found later, and then takes time away from what counted as work.
fn time(page: &Page<'_>, times: &Times) -> prometheus::Result<()> {
    let rows = Class::ALL.map(|class| (class.name(), times.of(class) as f64 / 1000.0));
    let help = "What the time since the first start of the job went into, over all launchers: see `ckpt-run docs report`.";
    page.gauge("ckpt_run_time_seconds", help, "class", &rows)?;
    let help = "Share of the time since the first start of the job that was productive.";
    let ratio = times.effective_ratio().unwrap_or(0.0);
    page.gauge("ckpt_run_effective_time_ratio", help, "", &[("", ratio)])?;
    let help = "Work after the newest snapshot, which a failure now would lose.";
    page.gauge("ckpt_run_unsaved_work_seconds", help, "", &[("", times.unsaved_ms as f64 / 1000.0)])
}

fn snapshots(page: &Page<'_>, status: &JobStatus, now_unix_ms: u64) -> prometheus::Result<()> {
    let rows = [("saved", status.saved as f64), ("failed", status.failed as f64)];
    page.counter("ckpt_run_snapshots_total", "Checkpoints by this launcher.", "result", &rows)?;
    let totals = &status.totals;
    let help = "Time that the job was paused for snapshots.";
    page.counter("ckpt_run_stall_seconds_total", help, "", &[("", totals.stall_s)])?;
    let help = "Time from the start of each checkpoint until its snapshot was durable.";
    page.counter("ckpt_run_durable_seconds_total", help, "", &[("", totals.durable_s)])?;
    let rows = [
        ("logical", totals.bytes as f64),
        ("stored", totals.stored_bytes as f64),
        ("unread", totals.unread_bytes as f64),
    ];
    let help = "Bytes in snapshots (logical), bytes added to the store (stored), and unchanged bytes that were not read (unread).";
    page.counter("ckpt_run_snapshot_bytes_total", help, "kind", &rows)?;
    if let Some(taken_unix_ms) = status.newest_unix_ms {
        let age_s = now_unix_ms.saturating_sub(taken_unix_ms) as f64 / 1000.0;
        let help = "Age of the newest snapshot: the work that a failure now would lose.";
        page.gauge("ckpt_run_newest_snapshot_age_seconds", help, "", &[("", age_s)])?;
    }
    if let Some(saved) = &status.last_snapshot {
        let help = "Time that the job was paused for the newest snapshot.";
        page.gauge("ckpt_run_last_stall_seconds", help, "", &[("", saved.stall_s)])?;
        let help = "Time from the start of the newest checkpoint until its snapshot was durable.";
        page.gauge("ckpt_run_last_durable_seconds", help, "", &[("", saved.durable_s)])?;
        if let Some(cut) = &saved.cut {
            let help = "Time until all ranks of NCCL stood at the same step, for the newest snapshot.";
            page.gauge("ckpt_run_last_cut_seconds", help, "", &[("", cut.duration_s)])?;
            let attempts = f64::from(cut.attempts);
            page.gauge("ckpt_run_last_cut_attempts", "Number of attempts for that.", "", &[("", attempts)])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckpt_protocol::control::{
        CutTime, DeviceMemory, LateDoing, LateRank, Progress, Saved, Totals, Uploads,
    };
    use serde_json::Value;
    use std::collections::BTreeSet;

    fn saved() -> Saved {
        Saved {
            id: "000001-x".to_owned(),
            bytes: 3000,
            stored_bytes: Some(1000),
            changed_bytes: None,
            unread_bytes: 500,
            stall_s: 0.25,
            stall_phases: None,
            cut: Some(Box::new(CutTime { duration_s: 0.125, attempts: 2 })),
            durable_s: 2.5,
            taken_unix_ms: 60_000,
            in_memory: false,
            is_doubtful: false,
            uncovered_files: std::collections::BTreeMap::new(),
        }
    }

    fn has(page: &str, line: &str) {
        assert!(page.lines().any(|found| found == line), "{line} is not in:\n{page}");
    }

    fn late((doing, late_s): (LateDoing, f64)) -> LateRank {
        LateRank {
            rank: 3,
            pid: 7,
            process: "python3".to_owned(),
            node: None,
            communicator: "1a2b3c4d".to_owned(),
            call: None,
            number: 8,
            waiting: vec![0],
            late_s,
            doing,
        }
    }

    fn status() -> JobStatus {
        JobStatus {
            job: "train".to_owned(),
            saved: 4,
            failed: 2,
            restarts: 3,
            restart_s: Some(1.0),
            newest_unix_ms: Some(60_000),
            last_snapshot: Some(saved()),
            progress: Progress { phase: Phase::Persist, done_bytes: 1, total_bytes: 2 },
            totals: Totals {
                stall_s: 1.5,
                durable_s: 10.0,
                bytes: 9000,
                stored_bytes: 4000,
                unread_bytes: 700,
            },
            device_memory: Some(DeviceMemory {
                bytes: 800,
                mirror: "changed".to_owned(),
                mirror_bytes: 80,
                ..DeviceMemory::default()
            }),
            uploads: Some(Uploads { uploaded: 5, failed: 1, stored_bytes: 77, ..Uploads::default() }),
            late_ranks: [(LateDoing::Nothing, 34.0), (LateDoing::Cpu, 31.0), (LateDoing::Files, 30.5)]
                .map(late)
                .into(),
            ..JobStatus::default()
        }
    }

    #[test]
    fn every_number_is_shown() {
        let times = Times {
            begun_unix_ms: 10_000,
            ended_unix_ms: 90_000,
            time_ms: [(Class::Productive, 60_000), (Class::Stall, 1500), (Class::Away, 18_500)].into(),
            unsaved_ms: 2500,
            ..Times::default()
        };
        let page = text(&status(), Some(&times), 90_000).unwrap();
        for line in [
            r#"ckpt_run_snapshots_total{job="train",result="saved"} 4"#,
            r#"ckpt_run_snapshots_total{job="train",result="failed"} 2"#,
            r#"ckpt_run_stall_seconds_total{job="train"} 1.5"#,
            r#"ckpt_run_durable_seconds_total{job="train"} 10"#,
            r#"ckpt_run_snapshot_bytes_total{job="train",kind="logical"} 9000"#,
            r#"ckpt_run_snapshot_bytes_total{job="train",kind="stored"} 4000"#,
            r#"ckpt_run_snapshot_bytes_total{job="train",kind="unread"} 700"#,
            r#"ckpt_run_newest_snapshot_age_seconds{job="train"} 30"#,
            r#"ckpt_run_last_stall_seconds{job="train"} 0.25"#,
            r#"ckpt_run_last_durable_seconds{job="train"} 2.5"#,
            r#"ckpt_run_last_cut_seconds{job="train"} 0.125"#,
            r#"ckpt_run_last_cut_attempts{job="train"} 2"#,
            r#"ckpt_run_restarts_total{job="train"} 3"#,
            r#"ckpt_run_job_running{job="train"} 0"#,
            r#"ckpt_run_phase{job="train",phase="persist"} 1"#,
            r#"ckpt_run_phase{job="train",phase="idle"} 0"#,
            r#"ckpt_run_uploads_total{job="train",result="uploaded"} 5"#,
            r#"ckpt_run_uploads_total{job="train",result="failed"} 1"#,
            r#"ckpt_run_upload_bytes_total{job="train"} 77"#,
            r#"ckpt_run_uploading{job="train"} 0"#,
            r#"ckpt_run_device_memory_bytes{job="train"} 800"#,
            r#"ckpt_run_mirror_bytes{job="train",mode="changed"} 80"#,
            r#"ckpt_run_late_ranks{job="train",state="hangs"} 1"#,
            r#"ckpt_run_late_ranks{job="train",state="works"} 2"#,
            r#"ckpt_run_late_rank_wait_seconds{job="train"} 34"#,
            r#"ckpt_run_time_seconds{class="productive",job="train"} 60"#,
            r#"ckpt_run_time_seconds{class="stall",job="train"} 1.5"#,
            r#"ckpt_run_time_seconds{class="hang",job="train"} 0"#,
            r#"ckpt_run_time_seconds{class="away",job="train"} 18.5"#,
            r#"ckpt_run_effective_time_ratio{job="train"} 0.75"#,
            r#"ckpt_run_unsaved_work_seconds{job="train"} 2.5"#,
        ] {
            has(&page, line);
        }
    }

    /// The names of metrics in a text.
    fn names(text: &str) -> BTreeSet<&str> {
        let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        words.filter(|word| word.starts_with("ckpt_run_")).collect()
    }

    #[test]
    fn the_dashboard_shows_metrics_that_exist() {
        let dashboard: Value =
            serde_json::from_str(include_str!("../../../docs/grafana/ckpt-run.json")).unwrap();
        let page = text(&status(), Some(&Times::default()), 90_000).unwrap();
        let known = names(&page);
        let panels = dashboard["panels"].as_array().unwrap();
        assert!(panels.len() > 10);
        let mut ids = BTreeSet::new();
        for panel in panels {
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
            for target in panel["targets"].as_array().unwrap() {
                let shown = target["expr"].as_str().map(names).unwrap();
                assert!(!shown.is_empty() && shown.is_subset(&known), "{target}");
            }
        }
        let variables = dashboard["templating"].to_string();
        assert!(names(&variables).is_subset(&known), "{variables}");
    }

    #[test]
    fn missing_values_are_left_out() {
        let page = text(&JobStatus { job: "j".to_owned(), ..JobStatus::default() }, None, 1).unwrap();
        assert!(
            !page.contains("mirror")
                && !page.contains("age")
                && !page.contains("upload")
                && !page.contains("last"),
            "{page}"
        );
        has(&page, r#"ckpt_run_snapshots_total{job="j",result="saved"} 0"#);
        has(&page, r#"ckpt_run_phase{job="j",phase="idle"} 1"#);
    }

    #[test]
    fn totals_grow_with_each_snapshot_and_an_address_is_taken_once() {
        let status = Arc::new(SharedStatus::new("j".to_owned()));
        status.saved(&saved());
        status.saved(&saved());
        let page = text(&status.snapshot(), None, 60_000).unwrap();
        has(&page, r#"ckpt_run_snapshot_bytes_total{job="j",kind="stored"} 2000"#);
        has(&page, r#"ckpt_run_stall_seconds_total{job="j"} 0.5"#);

        let dir = tempfile::tempdir().unwrap();
        let root = ckpt_snapshot::StoreRoot::open_or_create(&dir.path().join("store")).unwrap();
        let job = root.job(&ckpt_snapshot::JobKey::named("job").unwrap());
        let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let metrics = serve(listener, &status, &job).unwrap();
        let error = listen(address).unwrap_err();
        assert_eq!(crate::report::failure::exit_code(&error, 125), crate::sys::error::EXIT_BAD_INPUT);
        assert!(error.to_string().contains("--metrics"), "{error}");
        drop(metrics);
    }
}
