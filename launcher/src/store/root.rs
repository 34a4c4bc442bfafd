//! What `--store` names: a directory, or an address in an object store. An address comes with a directory on this machine
//! for local data: locks, the journal, logs of failures, tails of files.

use crate::store::options::StoreOptions;
use crate::store::tiers;
use crate::sys::deadline::STORE_RETRY_TIMEOUT;
use crate::sys::error::bad_input;
use crate::sys::runtime_dir::state_dir;
use anyhow::{Context, Result, anyhow};
use ckpt_object_medium::{Options, Pace, Service, Site, StoreUrl};
use ckpt_snapshot::codec::Key;
use ckpt_snapshot::medium::Medium;
use ckpt_snapshot::{JobDir, JobKey, OpenError, RelPath, StoreRoot, faults};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// How many records are read at a time.
const READERS: usize = 16;

/// The store.
pub struct Root {
    /// The key that snapshots are encrypted with.
    key: Option<Key>,
    local: StoreRoot,
    remote: Option<Remote>,
}

struct Remote {
    url: StoreUrl,
    site: Site,
}

impl Root {
    /// Opens the store for a command. A directory has to exist.
    ///
    /// # Errors
    /// Bad input.
    pub fn open(options: &StoreOptions) -> Result<Self> {
        if let Some(url) = &options.url {
            let retry = options.short_retry();
            return Self::at(options, url, Options { retry, ..Options::default() });
        }
        let local = trusted(options, StoreRoot::open)?.map_err(|error| match error {
            OpenError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => options.check_mounted().err().unwrap_or_else(|| bad_input(anyhow!(
                "there is no store at {}: name the job's store with --store, or run this command in the directory in which the job was started{}",
                options.dir.display(),
                options.upload.as_ref().map(|url| format!(". What was uploaded: --store {url}")).unwrap_or_default()
            ))),
            other => other.into(),
        })?;
        Ok(Self { key: options.key.clone(), local, remote: None })
    }

    /// Opens the store for a command that changes it.
    ///
    /// # Errors
    /// Bad input; a store of another user, for root.
    pub fn open_to_change(options: &StoreOptions) -> Result<Self> {
        let root = Self::open(options)?;
        refuse_to_shut_out(options)?;
        Ok(root)
    }

    /// Opens the store for a run, which uploads at `pace`. A missing directory is created; a store at an address has to
    /// answer.
    ///
    /// # Errors
    /// Bad input; a store of another user, for root.
    pub fn open_or_create(options: &StoreOptions, pace: &Arc<Pace>) -> Result<Self> {
        options.check_trust()?;
        options.upload.as_ref().map_or(Ok(()), |url| options.check_address(url))?;
        refuse_to_shut_out(options)?;
        options.create_addresses();
        let Some(url) = &options.url else {
            let local = trusted(options, StoreRoot::open_or_create)??;
            return Ok(Self { key: options.key.clone(), local, remote: None });
        };
        let root = Self::at(options, url, Options { pace: Arc::clone(pace), ..Options::default() })?;
        root.check()?;
        Ok(root)
    }

    fn at(options: &StoreOptions, url: &StoreUrl, client: Options) -> Result<Self> {
        let site = Site::open(url, client).map_err(bad_input)?;
        let local = trusted(options, StoreRoot::open_or_create)?.with_context(|| {
            format!("cannot create the directory on this machine for locks and logs of {url}")
        })?;
        Ok(Self { key: options.key.clone(), local, remote: Some(Remote { url: url.clone(), site }) })
    }

    /// Checks that a store at an address can be used. A directory passes.
    ///
    /// # Errors
    /// Bad input: the problem, and what to do about it.
    pub fn check(&self) -> Result<()> {
        let Some(Remote { url, site }) = &self.remote else { return Ok(()) };
        site.check(STORE_RETRY_TIMEOUT).map_err(|error| bad_input(anyhow!("{}", unusable(url, &error))))
    }

    /// The store's path or address.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.remote {
            Some(remote) => remote.url.to_string(),
            None => self.local.path().display().to_string(),
        }
    }

    /// The job `key`, whether it exists yet or not.
    #[must_use]
    pub fn job(&self, key: &JobKey) -> JobDir {
        let job = self.with_key(self.local.job(key));
        match &self.remote {
            Some(remote) => job.with_content_in(remote.site.below(&tiers::place(key))),
            None => job,
        }
    }

    /// In a store at an address: what the nodes of jobs have in common.
    #[must_use]
    pub fn objects_of_nodes(&self) -> Option<Arc<dyn Medium>> {
        let remote = self.remote.as_ref()?;
        Some(remote.site.below(&RelPath::new("nodes").expect("a plain path")))
    }

    fn with_key(&self, job: JobDir) -> JobDir {
        let Some(key) = &self.key else { return job };
        let job = job.with_key(Some(key));
        match state_dir() {
            Ok(dir) => job.with_seen_in(&dir.join("seen")),
            Err(_) => job,
        }
    }

    /// All jobs, by name, except those that were deleted as a whole.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn jobs(&self) -> Result<Vec<JobDir>> {
        Ok(present(self.all_jobs()?))
    }

    /// The same with those that were deleted, whose records are not read.
    ///
    /// # Errors
    /// As [`Self::jobs`].
    pub fn all_jobs(&self) -> Result<Vec<JobDir>> {
        let Some(Remote { url, site }) = &self.remote else {
            return Ok(self.local.jobs()?.into_iter().map(|job| self.with_key(job)).collect());
        };
        let jobs = RelPath::new("jobs").expect("a plain path");
        let names = site.names(&jobs).map_err(|error| bad_input(anyhow!("{}", unusable(url, &error))))?;
        Ok(names.iter().filter_map(|name| JobKey::named(name).ok()).map(|key| self.job(&key)).collect())
    }
}

/// Whether all of the job was deleted. A record that cannot be read says nothing.
#[must_use]
pub fn is_removed(job: &JobDir) -> bool {
    matches!(job.record(), Ok(Some(record)) if record.is_removed)
}

/// The jobs without those that were deleted as a whole. Their records are read by several threads: an object store takes a
/// while for each.
#[must_use]
pub fn present(jobs: Vec<JobDir>) -> Vec<JobDir> {
    let is_present = |job: &JobDir| !is_removed(job);
    let share = jobs.len().div_ceil(READERS).max(1);
    let read = |share: &[JobDir]| share.iter().map(is_present).collect::<Vec<_>>();
    let are_present: Vec<bool> = std::thread::scope(|scope| {
        let readers: Vec<_> = jobs.chunks(share).map(|share| scope.spawn(move || read(share))).collect();
        readers.into_iter().flat_map(|reader| reader.join().expect("it does not panic")).collect()
    });
    jobs.into_iter().zip(are_present).filter_map(|(job, is_present)| is_present.then_some(job)).collect()
}

/// Opens the store's directory, if no other user controls it. Another user may make a directory of that name after the first
/// look.
fn trusted(
    options: &StoreOptions,
    open: impl FnOnce(&Path) -> Result<StoreRoot, OpenError>,
) -> Result<Result<StoreRoot, OpenError>> {
    options.check_trust()?;
    faults::hit("store-trusted")?;
    let opened = open(&options.dir);
    options.check_trust()?;
    Ok(opened)
}

/// What root writes to a store of another user, that user cannot read.
fn refuse_to_shut_out(options: &StoreOptions) -> Result<()> {
    let dir = options.dir.display();
    match options.trust.owner_shut_out(&options.dir) {
        Some(owner) => Err(bad_input(anyhow!(
            "the store {dir} belongs to {owner}, who could neither read nor resume what root writes there. Run ckpt-run as that user (`sudo -u {} ckpt-run …`), name another store with --store, or allow it with --trust {}",
            owner.for_sudo(),
            options.dir.canonicalize().unwrap_or_else(|_| options.dir.clone()).display()
        ))),
        None => Ok(()),
    }
}

/// The address of the service that gives credentials to virtual machines of AWS, Google and Azure.
const MACHINE_CREDENTIALS: &str = "http://169.254.169.254/";

/// Why a store at an address cannot be used, and what to do about it.
fn unusable(url: &StoreUrl, error: &io::Error) -> String {
    let said = error.to_string();
    let variables = url.service().variables();
    // Without any credentials, the client asks the service of a cloud's virtual machines, and reports that.
    if said.contains(MACHINE_CREDENTIALS) {
        return format!(
            "the store {url} cannot be used: no credentials were found, and this machine has none of its own. Set {variables}"
        );
    }
    let remedy = match (error.kind(), url.service()) {
        (io::ErrorKind::Unsupported, _) => return format!("the store {url} cannot be used: {said}"),
        (_, Service::Directory) => "Look whether the path is right, and whether it may be written".to_owned(),
        (io::ErrorKind::PermissionDenied, _) => {
            format!(
                "Look whether the credentials are right and may read, write and delete there: set {variables}"
            )
        }
        (io::ErrorKind::NotFound, _) => {
            "Look whether the bucket's name is right; ckpt-run does not make buckets".to_owned()
        }
        _ => format!("Look whether the service can be reached from here, and set {variables}"),
    };
    format!("the store {url} cannot be used: {}. {remedy}", said.trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unusable_store_is_reported_with_a_remedy() {
        let url: StoreUrl = "s3://bucket/x".parse().unwrap();
        let said = |kind, text: &str| unusable(&url, &io::Error::new(kind, text.to_owned()));
        for (kind, remedy) in [
            (io::ErrorKind::PermissionDenied, "set AWS_ACCESS_KEY_ID"),
            (io::ErrorKind::NotFound, "the bucket's name"),
            (io::ErrorKind::TimedOut, "can be reached from here"),
        ] {
            let said = said(kind, "looking into s3://bucket/x: no.");
            assert!(said.starts_with("the store s3://bucket/x cannot be used: looking into"), "{said}");
            assert!(said.contains("no. Look") && said.contains(remedy), "{said}");
        }
        let said = said(io::ErrorKind::PermissionDenied, "PUT http://169.254.169.254/latest/api/token: 403");
        assert!(said.contains("no credentials were found") && said.ends_with("not Amazon's)"), "{said}");
        assert_eq!(said.matches("AWS_ACCESS_KEY_ID").count(), 1, "{said}");
    }
}
