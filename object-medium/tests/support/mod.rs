//! What the tests of the medium share: a service with a medium on it, and content.
#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test program uses a part of it")]

use ckpt_object_medium::{ObjectMedium, Options, Pace, Retry};
use ckpt_snapshot::RelPath;
use ckpt_snapshot::medium::{Medium, read_all};
pub use ckpt_test_s3::{BUCKET, KEY, SECRET, Service};
use std::io;
use std::sync::Arc;
use std::time::Duration;

pub const MIB: usize = 1 << 20;

/// A service, and media on it.
pub struct Scene(Service);

impl std::ops::Deref for Scene {
    type Target = Service;

    fn deref(&self) -> &Service {
        &self.0
    }
}

impl Scene {
    pub fn new() -> Self {
        Self(Service::new())
    }

    /// A medium that is patient enough for a test.
    pub fn medium(&self) -> ObjectMedium {
        self.medium_with(patient(), Arc::new(Pace::default()))
    }

    pub fn medium_with(&self, retry: Retry, pace: Arc<Pace>) -> ObjectMedium {
        let options = Options { settings: self.settings(), retry, pace, ..Options::default() };
        ObjectMedium::open(&format!("s3://{BUCKET}/team").parse().unwrap(), options).unwrap()
    }

    pub fn settings(&self) -> Vec<(String, String)> {
        settings(&self.endpoint(), KEY, SECRET)
    }
}

pub fn settings(endpoint: &str, key: &str, secret: &str) -> Vec<(String, String)> {
    [
        ("aws_endpoint", endpoint),
        ("aws_access_key_id", key),
        ("aws_secret_access_key", secret),
        ("aws_allow_http", "true"),
        // One request per connection: what the proxy does to it, it does to no other.
        ("pool_max_idle_per_host", "0"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

pub fn patient() -> Retry {
    Retry {
        give_up_after: Duration::from_secs(300),
        first_pause: Duration::from_millis(10),
        longest_pause: Duration::from_millis(100),
        stall: Duration::from_secs(100),
        ..Retry::default()
    }
}

/// Gives up after a few attempts.
pub fn hasty() -> Retry {
    Retry { give_up_after: Duration::from_millis(300), ..patient() }
}

pub fn name(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

/// Random bytes, different for each seed.
pub fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut out);
    out
}

/// Writes an object as a pack is written: block by block, the blocks of odd lengths.
pub fn write(medium: &dyn Medium, name: &RelPath, content: &[u8], block_bytes: usize) -> io::Result<()> {
    let mut writer = medium.create(name, 4, block_bytes)?;
    let (mut rest, mut turn) = (content, 0);
    while !rest.is_empty() {
        let mut block = writer.block()?;
        turn += 1;
        // Full, or short by some pages.
        let length = (block.len() - 4096 * (turn % 3).min(block.len() / 4096 - 1)).min(rest.len());
        let (now, later) = rest.split_at(length);
        block[..length].copy_from_slice(now);
        block.set_filled(length);
        writer.append(block)?;
        rest = later;
    }
    writer.finish()
}

pub fn read(medium: &dyn Medium, name: &RelPath) -> io::Result<Vec<u8>> {
    read_all(medium, name, 1 << 30)
}

/// Compares without printing megabytes.
#[track_caller]
pub fn assert_same(found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len());
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    assert_eq!(differs, None, "where they differ first");
}
