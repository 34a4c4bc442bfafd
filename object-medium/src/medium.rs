//! The medium: maps names to objects of the service. Reading and writing large objects is in `reader` and `writer`.

use crate::connect::{Client, connect};
use crate::pace::Pace;
use crate::reader::Reader;
use crate::retry::{Backoff, Retry, failure, is_temporary, status, to_io};
use crate::url::{Service, StoreUrl};
use crate::writer::Writer;
use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{Guard, Medium, ObjectReader, ObjectWriter};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{Error, ListResult, ObjectMeta, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use parking_lot::Mutex;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// The name prefix of the objects that probe the features of a service. They are not listed.
const PROBE: &str = ".probe-";

/// Options of an [`ObjectMedium`].
#[derive(Clone, Default)]
pub struct Options {
    /// Settings of the client by name (`aws_endpoint`, `google_service_account`, `azure_storage_account_name`, …).
    /// They override the environment. Values may be secrets and are never printed.
    pub settings: Vec<(String, String)>,
    /// The retry policy.
    pub retry: Retry,
    /// The rate limit of uploads.
    pub pace: Arc<Pace>,
    /// Asked before a directory (`file://`) that is missing is made.
    pub guard: Option<Guard>,
}

impl fmt::Debug for Options {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.settings.iter().map(|(name, _)| name).collect();
        out.debug_struct("Options")
            .field("settings", &names)
            .field("retry", &self.retry)
            .field("pace", &self.pace)
            .finish()
    }
}

/// Objects in an object store. Network I/O runs on threads of its own; calls block and must not be made from
/// asynchronous code.
#[derive(Clone)]
pub struct ObjectMedium {
    url: StoreUrl,
    shared: Arc<Shared>,
}

/// The state that media of one connection share.
pub(crate) struct Shared {
    pub(crate) core: Arc<Core>,
    pub(crate) runtime: Runtime,
}

/// The state that tasks on the runtime use. Tasks must not own the runtime: it would be dropped on one of its threads.
pub(crate) struct Core {
    pub(crate) client: Client,
    pub(crate) retry: Retry,
    pub(crate) pace: Arc<Pace>,
    /// Whether the service is known to support conditional puts.
    has_conditional_puts: AtomicBool,
    probing: Mutex<()>,
}

/// An object to be written or removed.
pub(crate) struct Object {
    pub(crate) core: Arc<Core>,
    pub(crate) service: Arc<dyn MultipartStore>,
    /// What is done with it, for messages.
    pub(crate) what: String,
    pub(crate) path: Path,
}

impl fmt::Debug for ObjectMedium {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "ObjectMedium({})", self.url)
    }
}

impl ObjectMedium {
    /// The objects below `url`. Credentials and endpoints come from the usual variables (`AWS_…`, `GOOGLE_…`,
    /// `AZURE_…`) and from `options`. Sends no request yet; [`ObjectMedium::check`] tests the connection.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if settings are missing or invalid.
    pub fn open(url: &StoreUrl, options: Options) -> io::Result<Self> {
        let client = connect(url, &options.settings)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("object-store")
            .enable_all()
            .build()?;
        let core = Core {
            client,
            retry: options.retry,
            pace: options.pace,
            has_conditional_puts: AtomicBool::new(matches!(url.service(), Service::Gcs | Service::Azure)),
            probing: Mutex::new(()),
        };
        Ok(Self { url: url.clone(), shared: Arc::new(Shared { core: Arc::new(core), runtime }) })
    }

    /// The objects below `path`, over the same connections.
    #[must_use]
    pub fn below(&self, path: &RelPath) -> Self {
        Self { url: self.url.below(path), shared: Arc::clone(&self.shared) }
    }

    /// Its address.
    #[must_use]
    pub fn url(&self) -> &StoreUrl {
        &self.url
    }

    /// Checks that the service answers, accepts the credentials, and supports conditional puts. Temporary failures are
    /// retried for `retry_timeout`.
    ///
    /// # Errors
    /// The failed request, or the missing feature.
    pub fn check(&self, retry_timeout: Duration) -> io::Result<()> {
        let retry = &self.shared.core.retry;
        let retry = Retry { give_up_after: retry_timeout.min(retry.give_up_after), ..retry.clone() };
        let what = format!("listing {}", self.url);
        let prefix = self.prefix()?;
        let store = &self.shared.core.client.store;
        self.shared.runtime.block_on(retry.run(&what, 0, || store.list_with_delimiter(prefix.as_ref())))?;
        if self.shared.core.client.parts.is_some() { self.probe(&retry) } else { Ok(()) }
    }

    /// The names directly below `dir` (or the medium's address) that have objects below them.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub fn list_dirs(&self, dir: Option<&RelPath>) -> io::Result<Vec<String>> {
        let found = self.list_below(dir)?;
        let name = |path: &Path| path.filename().map(str::to_owned);
        Ok(found.common_prefixes.iter().filter_map(name).collect())
    }

    fn list_below(&self, dir: Option<&RelPath>) -> io::Result<ListResult> {
        let (what, prefix) = match dir {
            Some(dir) => (self.describe(dir), Some(self.path(dir)?)),
            None => (self.url.to_string(), self.prefix()?),
        };
        let core = &self.shared.core;
        let list = || core.client.store.list_with_delimiter(prefix.as_ref());
        self.shared.runtime.block_on(core.retry.run(&format!("listing {what}"), 0, list))
    }

    /// The objects directly below `dir`, by their names.
    fn objects(&self, dir: &RelPath) -> io::Result<Vec<(String, ObjectMeta)>> {
        let found = match self.list_below(Some(dir)) {
            // Unlike object stores, web servers have real directories, and this one may be missing.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.url.service() == Service::Http => {
                return Ok(Vec::new());
            }
            other => other?,
        };
        let named = found.objects.into_iter().filter_map(|object| {
            let name = object.location.filename()?.to_owned();
            (!name.starts_with(PROBE)).then_some((name, object))
        });
        Ok(named.collect())
    }

    fn prefix(&self) -> io::Result<Option<Path>> {
        let prefix = self.url.prefix();
        if prefix.is_empty() { Ok(None) } else { self.parse(prefix).map(Some) }
    }

    fn path(&self, name: &RelPath) -> io::Result<Path> {
        self.parse(self.url.below(name).prefix())
    }

    fn parse(&self, path: &str) -> io::Result<Path> {
        Path::parse(path).map_err(|error| failure(io::ErrorKind::InvalidInput, &self.url.to_string(), &error))
    }

    /// The object `name`, for writing or removing.
    fn object(&self, doing: &str, name: &RelPath) -> io::Result<Object> {
        let (what, core) = (format!("{doing} {}", self.describe(name)), Arc::clone(&self.shared.core));
        let Some(service) = core.client.parts.clone() else {
            let reason = "a web server can only be read from. Use s3://, gs:// or az:// for writing";
            return Err(failure(io::ErrorKind::Unsupported, &what, &reason));
        };
        Ok(Object { core, service, what, path: self.path(name)? })
    }

    /// Checks once that the service supports conditional puts. Some S3-compatible services ignore the condition: two
    /// snapshots of the same name could then overwrite each other.
    fn probe(&self, retry: &Retry) -> io::Result<()> {
        let core = &self.shared.core;
        let _one = core.probing.lock();
        if core.has_conditional_puts.load(Ordering::Acquire) {
            return Ok(());
        }
        let name = RelPath::new(format!("{PROBE}{}", random_name())).expect("a plain path");
        let object = Object { what: self.describe(&name), ..self.object("writing", &name)? };
        let outcome = self.shared.runtime.block_on(async {
            object.put_new(retry, b"1").await?;
            let second = object.put_new(retry, b"2").await;
            let _ = object.remove().await;
            Ok::<_, io::Error>(second)
        })?;
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                core.has_conditional_puts.store(true, Ordering::Release);
                Ok(())
            }
            Err(error) => Err(error),
            Ok(()) => Err(no_conditions(&self.url.to_string(), &"it created the same object twice")),
        }
    }
}

fn no_conditions(what: &str, reason: &dyn fmt::Display) -> io::Error {
    let text = format!(
        "the service does not support conditional puts (If-None-Match), without which two jobs could overwrite each other's snapshots: {reason}. Use another service, or a newer version of this one"
    );
    failure(io::ErrorKind::Unsupported, what, &text)
}

/// 128 random bits, from the random keys of the standard library's hasher.
fn random_name() -> String {
    let half = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", half(), half())
}

impl Object {
    /// Creates or replaces it in one request.
    pub(crate) async fn put(&self, content: PutPayload) -> io::Result<()> {
        let bytes = content.content_length() as u64;
        let put = || async {
            self.core.pace.wait(bytes).await;
            self.core.client.store.put(&self.path, content.clone()).await
        };
        self.core.retry.run(&self.what, bytes, put).await.map(drop)
    }

    /// Creates it, unless it exists.
    ///
    /// An attempt whose response was lost may have created the object. The next attempt then finds it and compares its
    /// content with ours. (If two writers put the same content under the same name, both may succeed.)
    async fn put_new(&self, retry: &Retry, content: &[u8]) -> io::Result<()> {
        let (store, what) = (&self.core.client.store, &self.what);
        let (payload, bytes) = (PutPayload::from(content.to_vec()), content.len() as u64);
        let mut backoff = Backoff::new(retry);
        let mut may_be_ours = false;
        let failed = loop {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            let put = store.put_opts(&self.path, payload.clone(), options);
            let reason = match timeout(retry.attempt_limit(bytes), put).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error @ (Error::AlreadyExists { .. } | Error::Precondition { .. }))) => {
                    if let Some(is_same) = self.is_present(retry, content).await? {
                        return settle(what, may_be_ours && is_same);
                    }
                    // Another writer has failed to create it after all.
                    error.to_string()
                }
                Ok(Err(error)) if refuses_condition(&error) => return Err(no_conditions(what, &error)),
                Ok(Err(error)) if !is_temporary(&error) => break to_io(what, error),
                Ok(Err(error)) => {
                    may_be_ours = true;
                    error.to_string()
                }
                Err(_) => {
                    may_be_ours = true;
                    retry.too_slow(bytes)
                }
            };
            if let Err(error) = backoff.pause(what, &reason).await {
                break error;
            }
        };
        // After an error the caller may remove the object, so report one that another writer has created.
        let last = Retry { give_up_after: Duration::ZERO, ..retry.clone() };
        match self.is_present(&last, content).await {
            Ok(Some(is_same)) => settle(what, may_be_ours && is_same),
            _ => Err(failed),
        }
    }

    /// If it exists, whether it has this content. Somebody may have created one of any length: that is not read.
    async fn is_present(&self, retry: &Retry, content: &[u8]) -> io::Result<Option<bool>> {
        let get = || async {
            let found = self.core.client.store.get(&self.path).await?;
            Ok(found.meta.size == content.len() as u64 && found.bytes().await? == content)
        };
        match retry.run(&self.what, 0, get).await {
            Ok(is_same) => Ok(Some(is_same)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn remove(&self) -> io::Result<()> {
        let core = &self.core;
        match core.retry.run(&self.what, 0, || core.client.store.delete(&self.path)).await {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// The result of a conditional put that found an existing object.
fn settle(what: &str, is_ours: bool) -> io::Result<()> {
    if is_ours {
        Ok(())
    } else {
        Err(failure(io::ErrorKind::AlreadyExists, what, &"the object exists already"))
    }
}

/// Whether the service reports that it does not support conditional puts.
fn refuses_condition(error: &Error) -> bool {
    matches!(error, Error::NotImplemented { .. } | Error::NotSupported { .. })
        || status(error) == Some(501)
        || status(error) == Some(400) && error.to_string().contains("NotImplemented")
}

impl Medium for ObjectMedium {
    fn describe(&self, name: &RelPath) -> String {
        self.url.below(name).to_string()
    }

    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        let object = self.object("writing", name)?;
        Ok(Box::new(Writer::new(Arc::clone(&self.shared), object, blocks, block_bytes)))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        let (object, core) = (self.object("writing", name)?, &self.shared.core);
        self.probe(&core.retry)?;
        self.shared.runtime.block_on(async {
            core.pace.wait(content.len() as u64).await;
            object.put_new(&core.retry, content).await
        })
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        let what = format!("reading {}", self.describe(name));
        let reader = Reader::open(Arc::clone(&self.shared), what, self.path(name)?)?;
        Ok(Box::new(reader))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        Ok(self.objects(dir)?.into_iter().map(|(name, object)| (name, object.size)).collect())
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let objects = self.objects(dir)?.into_iter();
        Ok(objects.map(|(name, object)| (name, object.last_modified.into())).collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        let object = self.object("removing", name)?;
        self.shared.runtime.block_on(object.remove())?;
        tracing::debug!("removed {}", self.describe(name));
        Ok(())
    }

    /// Removes leftover probes. The client library cannot list incomplete multipart uploads of killed processes; they
    /// are invisible, but the service may charge for them. S3 and GCS remove them if the bucket has the rule
    /// `AbortIncompleteMultipartUpload`, Azure does so after a week.
    fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        if self.shared.core.client.parts.is_none() {
            return Ok(Vec::new());
        }
        let mut swept = Vec::new();
        for object in self.list_below(None)?.objects {
            let Some(name) = object.location.filename().filter(|name| name.starts_with(PROBE)) else {
                continue;
            };
            if SystemTime::now().duration_since(object.last_modified.into()).unwrap_or_default() < age {
                continue;
            }
            let name = RelPath::new(name).map_err(io::Error::other)?;
            self.remove(&name)?;
            swept.push(self.describe(&name));
        }
        Ok(swept)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(None)
    }
}
