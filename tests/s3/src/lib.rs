//! An S3 server on the loopback interface, and a proxy in front of it that makes trouble: for tests of the object
//! store and of whole jobs that use one.

pub mod proxy;
pub mod server;

use proxy::Proxy;
use server::Server;

/// The only key that the server takes.
pub const KEY: &str = "test-key";
/// Its secret.
pub const SECRET: &str = "test-secret-hush-hush";
/// The only bucket.
pub const BUCKET: &str = "bucket";

/// A server, and a proxy before it.
pub struct Service {
    /// What clients talk to.
    pub proxy: Proxy,
    /// What is behind it.
    pub server: Server,
    _runtime: tokio::runtime::Runtime,
}

impl Service {
    /// Starts both. They end when this is dropped.
    ///
    /// # Panics
    /// When there is no port or no thread to be had.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts a server")]
    pub fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = Server::start(&runtime);
        let proxy = Proxy::start(&runtime, server.address);
        Self { proxy, server, _runtime: runtime }
    }

    /// Where clients reach it.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.proxy.address)
    }
}
