//! Creates the client of a service from an address and the environment.

use crate::retry::failure;
use crate::url::{Service, StoreUrl};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{ClientConfigKey, Error, ObjectStore, RetryConfig};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Settings of a client by name, such as `aws_endpoint`. Values may be secrets.
pub(crate) type Settings = [(String, String)];

/// A client of one service. It may hold secrets and is never printed.
pub(crate) struct Client {
    pub(crate) store: Arc<dyn ObjectStore>,
    /// Multipart uploads; `None` if the service is read-only.
    pub(crate) parts: Option<Arc<dyn MultipartStore>>,
}

/// The timeout of the client library, effectively off: [`crate::Retry`] has the timeouts of requests.
const CLIENT_TIMEOUT: &str = "1 day";

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() }
}

/// Creates a client. Sends no request yet.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] if a setting is unknown or missing.
pub(crate) fn connect(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    match url.service() {
        Service::S3 => s3(url, settings),
        Service::Gcs => gcs(url, settings),
        Service::Azure => azure(url, settings),
        Service::Http => http(url, settings),
        Service::Directory => Err(invalid(url, &"it is a directory, not an object store")),
    }
}

fn refused(url: &StoreUrl, reason: &str) -> io::Error {
    failure(io::ErrorKind::InvalidInput, &format!("the store {url}"), &reason)
}

fn invalid(url: &StoreUrl, reason: &dyn std::fmt::Display) -> io::Error {
    refused(url, &format!("{reason} (set {})", url.service().variables()))
}

/// Refuses unencrypted connections unless the user has allowed them.
fn check_endpoint(
    url: &StoreUrl,
    endpoint: Option<String>,
    allow_http: Option<String>,
    name: &str,
) -> io::Result<()> {
    let is_plain = endpoint.is_some_and(|endpoint| endpoint.to_ascii_lowercase().starts_with("http://"));
    let allows = |value: String| matches!(value.to_ascii_lowercase().as_str(), "true" | "1" | "on");
    if is_plain && !allow_http.is_some_and(allows) {
        let reason = format!(
            "its endpoint is http://, which is not encrypted. Use https://, or set {name}_ALLOW_HTTP=true"
        );
        return Err(refused(url, &reason));
    }
    Ok(())
}

/// The builder of a client with the user's settings, and then with what ckpt-run decides.
macro_rules! configured {
    ($builder:expr, $key:ty, $url:expr, $address:expr, $settings:expr) => {{
        let mut builder = $builder;
        for (name, value) in $settings {
            let key: $key =
                name.parse().map_err(|_| refused($url, &format!("its client has no setting {name:?}")))?;
            builder = builder.with_config(key, value);
        }
        let timeout: $key = "timeout".parse().expect("every client has this setting");
        builder.with_url($address).with_retry(no_retries()).with_config(timeout, CLIENT_TIMEOUT)
    }};
}

fn s3(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    // Not every S3-compatible service supports bulk deletes.
    let builder = AmazonS3Builder::from_env().with_disable_bulk_delete(true);
    let builder = configured!(builder, AmazonS3ConfigKey, url, url.as_str(), settings);
    let value = |key| builder.get_config_value(&key);
    let allow_http = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    check_endpoint(url, value(AmazonS3ConfigKey::Endpoint), allow_http, "AWS")?;
    writable(url, builder.build())
}

fn gcs(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let builder = GoogleCloudStorageBuilder::from_env();
    writable(url, configured!(builder, GoogleConfigKey, url, url.as_str(), settings).build())
}

fn azure(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let builder = MicrosoftAzureBuilder::from_env();
    let builder = configured!(builder, AzureConfigKey, url, url.as_str(), settings);
    let value = |key| builder.get_config_value(&key);
    let allow_http = value(AzureConfigKey::Client(ClientConfigKey::AllowHttp));
    check_endpoint(url, value(AzureConfigKey::Endpoint), allow_http, "AZURE")?;
    writable(url, builder.build())
}

fn writable<S: ObjectStore + MultipartStore>(url: &StoreUrl, built: Result<S, Error>) -> io::Result<Client> {
    let store = Arc::new(built.map_err(|error| invalid(url, &error))?);
    Ok(Client { store: Arc::clone(&store) as _, parts: Some(store) })
}

/// The address itself says whether the connection is encrypted.
fn http(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let builder = HttpBuilder::new().with_config(ClientConfigKey::AllowHttp, "true");
    let built = configured!(builder, ClientConfigKey, url, url.origin(), settings).build();
    Ok(Client { store: Arc::new(built.map_err(|error| invalid(url, &error))?), parts: None })
}
