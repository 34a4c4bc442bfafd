//! s3s-fs with additions: conditional puts, listings by prefix and page, and the rules of real services for parts of an
//! upload.

use crate::{BUCKET, KEY, SECRET};
use hyper_util::rt::{TokioExecutor, TokioIo};
use s3s::auth::SimpleAuth;
use s3s::dto::*;
use s3s::service::S3ServiceBuilder;
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use s3s_fs::FileSystem;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Entries in one page of a listing; real services send a thousand.
const PAGE: usize = 5;

/// The server.
pub struct Server {
    /// The address that it listens on.
    pub address: SocketAddr,
    /// How it behaves, and its unfinished uploads.
    pub state: Arc<State>,
    root: TempDir,
}

/// How the server behaves, and its unfinished uploads.
#[derive(Default)]
pub struct State {
    /// Ignores the condition of a put and overwrites, as some services do.
    pub ignores_conditions: AtomicBool,
    /// Refuses conditional puts with status 501, as other services do.
    pub refuses_conditions: AtomicBool,
    /// The lengths of the parts of each unfinished upload.
    pub uploads: Mutex<BTreeMap<String, BTreeMap<i32, i64>>>,
    /// One commit at a time.
    commit: tokio::sync::Mutex<()>,
}

impl Server {
    /// Starts it, with an empty bucket.
    ///
    /// # Panics
    /// When no port is free.
    pub fn start(runtime: &Runtime) -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let state = Arc::new(State::default());
        let inner = FileSystem::new(root.path()).unwrap();
        let mut builder =
            S3ServiceBuilder::new(Strict { inner, root: root.path().to_owned(), state: Arc::clone(&state) });
        builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
        let service = builder.build().into_shared();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let service = service.clone();
                tokio::spawn(async move {
                    let http = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    // A client may close the connection at any time.
                    let _ = http.serve_connection(TokioIo::new(socket), service).await;
                });
            }
        });
        Self { address, state, root }
    }

    /// All objects with their lengths.
    pub fn objects(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        gather(&self.root.path().join(BUCKET), "", &mut all);
        all
    }

    /// Makes the object `name` look as old as `age`.
    ///
    /// # Panics
    /// When there is none.
    pub fn age(&self, name: &str, age: Duration) {
        let file = std::fs::File::options().write(true).open(self.root.path().join(BUCKET).join(name));
        file.unwrap().set_modified(SystemTime::now() - age).unwrap();
    }

    /// How many uploads are neither completed nor aborted.
    pub fn unfinished_uploads(&self) -> usize {
        self.state.uploads.lock().unwrap().len()
    }
}

fn gather(dir: &Path, prefix: &str, all: &mut BTreeMap<String, u64>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().unwrap().is_dir() {
            gather(&entry.path(), &format!("{name}/"), all);
        } else {
            all.insert(name, entry.metadata().unwrap().len());
        }
    }
}

struct Strict {
    inner: FileSystem,
    root: PathBuf,
    state: Arc<State>,
}

#[async_trait::async_trait]
impl S3 for Strict {
    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let state = &self.state;
        if req.input.if_none_match.is_some() {
            if state.refuses_conditions.load(Ordering::SeqCst) {
                return Err(s3_error!(
                    NotImplemented,
                    "A header you provided implies functionality that is not implemented"
                ));
            }
            let _one = state.commit.lock().await;
            let exists = self.root.join(&req.input.bucket).join(&req.input.key).exists();
            if exists && !state.ignores_conditions.load(Ordering::SeqCst) {
                return Err(s3_error!(PreconditionFailed));
            }
            return self.inner.put_object(req).await;
        }
        self.inner.put_object(req).await
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let made = self.inner.create_multipart_upload(req).await?;
        let id = made.output.upload_id.clone().unwrap();
        self.state.uploads.lock().unwrap().insert(id, BTreeMap::new());
        Ok(made)
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let (id, number) = (req.input.upload_id.clone(), req.input.part_number);
        let length = req.input.content_length.unwrap();
        let made = self.inner.upload_part(req).await?;
        let mut uploads = self.state.uploads.lock().unwrap();
        let Some(parts) = uploads.get_mut(&id) else { return Err(s3_error!(NoSuchUpload)) };
        parts.insert(number, length);
        Ok(made)
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let id = req.input.upload_id.clone();
        let Some(parts) = self.state.uploads.lock().unwrap().get(&id).cloned() else {
            return Err(s3_error!(NoSuchUpload));
        };
        let all_but_last: Vec<i64> = parts.values().rev().skip(1).copied().collect();
        if all_but_last.iter().any(|&length| length < 5 << 20) {
            return Err(s3_error!(EntityTooSmall));
        }
        // Amazon does not require equal lengths, but other services do.
        if all_but_last.iter().any(|&length| length != all_but_last[0]) {
            return Err(s3_error!(InvalidPart, "parts of different lengths"));
        }
        let made = self.inner.complete_multipart_upload(req).await?;
        self.state.uploads.lock().unwrap().remove(&id);
        Ok(made)
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        let id = req.input.upload_id.clone();
        let made = self.inner.abort_multipart_upload(req).await?;
        self.state.uploads.lock().unwrap().remove(&id);
        Ok(made)
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let wanted = req.input.if_match.clone();
        let found = self.inner.get_object(req).await?;
        if wanted.is_some() && wanted != found.output.e_tag {
            return Err(s3_error!(PreconditionFailed));
        }
        Ok(found)
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        self.inner.head_object(req).await
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let prefix = req.input.prefix.clone().unwrap_or_default();
        let (delimiter, after) = (req.input.delimiter.clone(), req.input.continuation_token.clone());
        let mut listed = self.inner.list_objects_v2(req).await?;
        let objects = listed.output.contents.take().unwrap_or_default();
        // An entry is an object, or the common prefix of several objects.
        let mut entries = BTreeMap::new();
        for object in objects {
            let key = object.key.clone().unwrap();
            let Some(below) = key.strip_prefix(&prefix) else { continue };
            match delimiter.as_deref().and_then(|delimiter| below.find(delimiter)) {
                Some(at) => entries.insert(key[..=prefix.len() + at].to_owned(), None),
                None => entries.insert(key, Some(object)),
            };
        }
        let mut page: Vec<_> =
            entries.into_iter().filter(|(key, _)| after.as_ref().is_none_or(|after| key > after)).collect();
        let truncated = page.len() > PAGE;
        page.truncate(PAGE);
        listed.output.is_truncated = Some(truncated);
        listed.output.next_continuation_token = page.last().filter(|_| truncated).map(|(key, _)| key.clone());
        listed.output.key_count = i32::try_from(page.len()).ok();
        let prefixes = page.iter().filter(|(_, object)| object.is_none());
        let common = prefixes.map(|(key, _)| CommonPrefix { prefix: Some(key.clone()) }).collect();
        listed.output.common_prefixes = Some(common);
        listed.output.contents = Some(page.into_iter().filter_map(|(_, object)| object).collect());
        Ok(listed)
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.inner.delete_object(req).await
    }
}
