//! An S3 server on the loopback interface, and a proxy in front of it that injects faults: for tests of the object
//! store and of jobs that use one.

#![forbid(unsafe_code)]

pub mod proxy;
pub mod server;

use proxy::Proxy;
use server::Server;
use std::net::TcpListener;

/// The only access key that the server accepts.
pub const KEY: &str = "test-key";
/// The secret of the access key.
pub const SECRET: &str = "test-secret-hush-hush";
/// The only bucket.
pub const BUCKET: &str = "bucket";

/// A server, and a proxy in front of it.
pub struct Service {
    /// The proxy that clients connect to.
    pub proxy: Proxy,
    /// The server behind the proxy.
    pub server: Server,
    runtime: tokio::runtime::Runtime,
}

impl Service {
    /// Starts both. They end when the value is dropped.
    ///
    /// # Panics
    /// When no port is free or no thread can be started.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts a server")]
    pub fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = Server::start(&runtime);
        let proxy = Proxy::start(&runtime, server.address);
        Self { proxy, server, runtime }
    }

    /// The URL for clients.
    #[must_use]
    pub fn endpoint(&self) -> String {
        self.proxy.endpoint()
    }

    /// The variables with which clients reach it.
    #[must_use]
    pub fn variables(&self) -> Vec<(String, String)> {
        let endpoint = self.endpoint();
        let variables = [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_ALLOW_HTTP", "true"),
            // The proxy serves one request per connection.
            ("AWS_POOL_MAX_IDLE_PER_HOST", "0"),
        ];
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec()
    }

    /// Another proxy in front of the same server, which listens there: in another network namespace, for example.
    ///
    /// # Panics
    /// When the socket cannot be used.
    #[must_use]
    pub fn proxy_at(&self, listener: TcpListener) -> Proxy {
        Proxy::at(&self.runtime, listener, self.server.address)
    }

    /// Another proxy in front of the same server, for clients on another machine.
    ///
    /// # Panics
    /// When no port is free.
    #[must_use]
    pub fn another_proxy(&self) -> Proxy {
        Proxy::start(&self.runtime, self.server.address)
    }
}
