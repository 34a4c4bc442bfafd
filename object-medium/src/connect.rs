//! Creates the client of a service from an address and the environment.

use crate::retry::failure;
use crate::url::{Service, StoreUrl};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};
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

fn invalid(url: &StoreUrl, reason: &dyn std::fmt::Display) -> io::Error {
    let hint = url.service().variables();
    failure(io::ErrorKind::InvalidInput, &format!("the store {url}"), &format!("{reason} (set {hint})"))
}

fn unknown_setting(url: &StoreUrl, name: &str) -> io::Error {
    failure(
        io::ErrorKind::InvalidInput,
        &format!("the store {url}"),
        &format!("its client has no setting {name:?}"),
    )
}

/// Refuses unencrypted connections unless the user has allowed them.
fn check_endpoint(
    url: &StoreUrl,
    endpoint: Option<&str>,
    allow_http: Option<&str>,
    name: &str,
) -> io::Result<()> {
    let plain = endpoint.is_some_and(|endpoint| endpoint.to_ascii_lowercase().starts_with("http://"));
    if plain
        && !allow_http.is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "true" | "1" | "on"))
    {
        let reason = format!(
            "its endpoint is http://, which is not encrypted. Use https://, or set {name}_ALLOW_HTTP=true"
        );
        return Err(failure(io::ErrorKind::InvalidInput, &format!("the store {url}"), &reason));
    }
    Ok(())
}

fn s3(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    // Not every S3-compatible service supports bulk deletes.
    let mut builder = AmazonS3Builder::from_env().with_disable_bulk_delete(true);
    for (name, value) in settings {
        let key: AmazonS3ConfigKey = name.parse().map_err(|_| unknown_setting(url, name))?;
        builder = builder.with_config(key, value);
    }
    let builder = builder
        .with_url(url.as_str())
        .with_retry(no_retries())
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), CLIENT_TIMEOUT);
    let value = |key| builder.get_config_value(&key);
    let allow_http = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    check_endpoint(url, value(AmazonS3ConfigKey::Endpoint).as_deref(), allow_http.as_deref(), "AWS")?;
    let store = Arc::new(builder.build().map_err(|error| invalid(url, &error))?);
    Ok(Client { store: Arc::clone(&store) as _, parts: Some(store) })
}

fn gcs(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let mut builder = GoogleCloudStorageBuilder::from_env();
    for (name, value) in settings {
        let key: GoogleConfigKey = name.parse().map_err(|_| unknown_setting(url, name))?;
        builder = builder.with_config(key, value);
    }
    let builder = builder
        .with_url(url.as_str())
        .with_retry(no_retries())
        .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), CLIENT_TIMEOUT);
    let store = Arc::new(builder.build().map_err(|error| invalid(url, &error))?);
    Ok(Client { store: Arc::clone(&store) as _, parts: Some(store) })
}

fn azure(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let mut builder = MicrosoftAzureBuilder::from_env();
    for (name, value) in settings {
        let key: AzureConfigKey = name.parse().map_err(|_| unknown_setting(url, name))?;
        builder = builder.with_config(key, value);
    }
    let builder = builder
        .with_url(url.as_str())
        .with_retry(no_retries())
        .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), CLIENT_TIMEOUT);
    let value = |key| builder.get_config_value(&key);
    let allow_http = value(AzureConfigKey::Client(ClientConfigKey::AllowHttp));
    check_endpoint(url, value(AzureConfigKey::Endpoint).as_deref(), allow_http.as_deref(), "AZURE")?;
    let store = Arc::new(builder.build().map_err(|error| invalid(url, &error))?);
    Ok(Client { store: Arc::clone(&store) as _, parts: Some(store) })
}

/// The address itself says whether the connection is encrypted.
fn http(url: &StoreUrl, settings: &Settings) -> io::Result<Client> {
    let mut builder = HttpBuilder::new().with_config(ClientConfigKey::AllowHttp, "true");
    for (name, value) in settings {
        let key: ClientConfigKey = name.parse().map_err(|_| unknown_setting(url, name))?;
        builder = builder.with_config(key, value);
    }
    let builder = builder
        .with_url(url.origin())
        .with_retry(no_retries())
        .with_config(ClientConfigKey::Timeout, CLIENT_TIMEOUT);
    let store = Arc::new(builder.build().map_err(|error| invalid(url, &error))?);
    Ok(Client { store, parts: None })
}
