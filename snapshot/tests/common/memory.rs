//! Media for tests: one in memory, and a wrapper that can inject failures and observe operations.

use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{Block, Medium, ObjectReader, ObjectWriter};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Formatter};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

/// The age of old objects.
const OLD_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

type Objects = BTreeMap<String, Arc<Vec<u8>>>;

/// Objects in memory. Its clones are the same medium.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    objects: Arc<Mutex<Objects>>,
    /// Objects that count as old; all others were just written.
    old: Arc<Mutex<BTreeSet<String>>>,
    /// Its capacity (bytes).
    size_bytes: Option<u64>,
}

impl Memory {
    /// A medium of its own with the same objects.
    pub fn fork(&self) -> Self {
        Self { objects: Arc::new(Mutex::new(self.objects())), ..self.clone() }
    }

    /// Makes all existing objects old.
    pub fn grow_old(&self) {
        self.old.lock().unwrap().extend(self.objects().into_keys());
    }

    /// The same medium with this much free space (bytes).
    pub fn with_free_bytes(&self, free_bytes: u64) -> Self {
        Self { size_bytes: Some(self.bytes() + free_bytes), ..self.clone() }
    }

    fn bytes(&self) -> u64 {
        self.objects().values().map(|content| content.len() as u64).sum()
    }

    pub fn objects(&self) -> Objects {
        self.objects.lock().unwrap().clone()
    }

    pub fn names(&self, suffix: &str) -> Vec<String> {
        self.objects().into_keys().filter(|name| name.ends_with(suffix)).collect()
    }

    pub fn set(&self, name: &str, content: Vec<u8>) {
        self.objects.lock().unwrap().insert(name.to_owned(), Arc::new(content));
    }

    pub fn unset(&self, name: &str) {
        self.objects.lock().unwrap().remove(name).unwrap();
    }

    /// Changes one byte.
    pub fn flip(&self, name: &str, position: usize) {
        let mut content = self.objects()[name].to_vec();
        content[position] ^= 0x10;
        self.set(name, content);
    }
}

impl Medium for Memory {
    fn describe(&self, name: &RelPath) -> String {
        format!("memory:{name}")
    }

    fn create(
        &self,
        name: &RelPath,
        _blocks: usize,
        block_bytes: usize,
    ) -> io::Result<Box<dyn ObjectWriter>> {
        Ok(Box::new(MemoryWriter {
            medium: self.clone(),
            name: name.clone(),
            content: Vec::new(),
            block_bytes,
        }))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        let mut objects = self.objects.lock().unwrap();
        if objects.contains_key(name.as_str()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        objects.insert(name.to_string(), Arc::new(content.to_vec()));
        Ok(())
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        let found = self.objects.lock().unwrap().get(name.as_str()).cloned();
        Ok(Box::new(MemoryReader(found.ok_or(io::ErrorKind::NotFound)?)))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        let dir = format!("{dir}/");
        let objects = self.objects.lock().unwrap();
        let below = objects.iter().filter_map(|(name, content)| Some((name.strip_prefix(&dir)?, content)));
        Ok(below.map(|(name, content)| (name.to_owned(), content.len() as u64)).collect())
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        let old = self.old.lock().unwrap();
        let time = |name: &str| {
            let age = if old.contains(&format!("{dir}/{name}")) { OLD_AGE } else { Duration::ZERO };
            SystemTime::now() - age
        };
        Ok(self.list(dir)?.into_iter().map(|(name, _)| (name.clone(), time(&name))).collect())
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        self.objects.lock().unwrap().remove(name.as_str());
        Ok(())
    }

    fn sweep(&self, _age: Duration) -> io::Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        Ok(self.size_bytes.map(|size_bytes| size_bytes.saturating_sub(self.bytes())))
    }
}

struct MemoryWriter {
    medium: Memory,
    name: RelPath,
    content: Vec<u8>,
    block_bytes: usize,
}

impl ObjectWriter for MemoryWriter {
    fn block(&mut self) -> io::Result<Block> {
        Ok(Block::new(self.block_bytes))
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        self.content.extend_from_slice(block.content());
        Ok(())
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.medium.put_new(&self.name, &self.content)
    }
}

struct MemoryReader(Arc<Vec<u8>>);

impl ObjectReader for MemoryReader {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.0.get(offset..offset + into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// When `judge` is called: before each operation, and also after those that change something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    Before,
    After,
}

type Judge = dyn Fn(When, &str, &str) -> io::Result<()> + Send + Sync;

/// A medium around another one. It calls `judge` for each operation, with the operation's name and the object's name; an
/// error of `judge` becomes the error of the operation.
#[derive(Clone)]
pub struct Judged {
    inner: Memory,
    judge: Arc<Judge>,
    open: Arc<Mutex<Open>>,
}

/// How many objects are open for reading now, and the maximum so far.
#[derive(Default)]
struct Open {
    now: usize,
    most: usize,
}

impl Judged {
    pub fn new(
        inner: Memory,
        judge: impl Fn(When, &str, &str) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { inner, judge: Arc::new(judge), open: Arc::default() }
    }

    /// The maximum number of objects that were open for reading at the same time.
    pub fn most_open(&self) -> usize {
        self.open.lock().unwrap().most
    }

    fn reads<T>(&self, kind: &str, name: &RelPath, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        (self.judge)(When::Before, kind, name.as_str())?;
        work()
    }

    fn changes<T>(&self, kind: &str, name: &RelPath, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        (self.judge)(When::Before, kind, name.as_str())?;
        let done = work()?;
        (self.judge)(When::After, kind, name.as_str())?;
        Ok(done)
    }
}

impl Debug for Judged {
    fn fmt(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        write!(out, "{:?}", self.inner)
    }
}

impl Medium for Judged {
    fn describe(&self, name: &RelPath) -> String {
        self.inner.describe(name)
    }

    fn create(&self, name: &RelPath, blocks: usize, block_bytes: usize) -> io::Result<Box<dyn ObjectWriter>> {
        let inner = self.reads("create", name, || self.inner.create(name, blocks, block_bytes))?;
        Ok(Box::new(JudgedWriter { inner, medium: self.clone(), name: name.clone() }))
    }

    fn put_new(&self, name: &RelPath, content: &[u8]) -> io::Result<()> {
        self.changes("put", name, || self.inner.put_new(name, content))
    }

    fn open(&self, name: &RelPath) -> io::Result<Box<dyn ObjectReader>> {
        let inner = self.reads("open", name, || self.inner.open(name))?;
        {
            let mut open = self.open.lock().unwrap();
            open.now += 1;
            open.most = open.most.max(open.now);
        }
        Ok(Box::new(JudgedReader { inner, medium: self.clone(), name: name.clone() }))
    }

    fn list(&self, dir: &RelPath) -> io::Result<Vec<(String, u64)>> {
        self.changes("list", dir, || self.inner.list(dir))
    }

    fn list_times(&self, dir: &RelPath) -> io::Result<Vec<(String, SystemTime)>> {
        self.reads("times", dir, || self.inner.list_times(dir))
    }

    fn remove(&self, name: &RelPath) -> io::Result<()> {
        self.changes("remove", name, || self.inner.remove(name))
    }

    fn sweep(&self, age: Duration) -> io::Result<Vec<String>> {
        self.inner.sweep(age)
    }

    fn free_bytes(&self) -> io::Result<Option<u64>> {
        self.inner.free_bytes()
    }
}

struct JudgedWriter {
    inner: Box<dyn ObjectWriter>,
    medium: Judged,
    name: RelPath,
}

impl ObjectWriter for JudgedWriter {
    fn block(&mut self) -> io::Result<Block> {
        self.inner.block()
    }

    fn append(&mut self, block: Block) -> io::Result<()> {
        (self.medium.judge)(When::Before, "append", self.name.as_str())?;
        self.inner.append(block)
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        let Self { inner, medium, name } = *self;
        medium.changes("finish", &name, || inner.finish())
    }
}

struct JudgedReader {
    inner: Box<dyn ObjectReader>,
    medium: Judged,
    name: RelPath,
}

impl Drop for JudgedReader {
    fn drop(&mut self) {
        self.medium.open.lock().unwrap().now -= 1;
    }
}

impl ObjectReader for JudgedReader {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.medium.reads("read", &self.name, || self.inner.read_at(offset, into))
    }
}
