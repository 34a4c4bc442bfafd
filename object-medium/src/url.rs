//! The address of a store: the service, the bucket and the prefix. It holds no secrets and may be printed and logged.

use ckpt_snapshot::RelPath;
use object_store::ObjectStoreScheme;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use url::Url;

/// The address of a store: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`,
/// `http(s)://HOST/PREFIX` or `file:///PATH`. The prefix is optional.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// Without a slash at the end.
    text: String,
    service: Service,
    /// The prefix in the bucket, or empty.
    prefix: String,
}

/// The service of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Amazon S3 and compatible services.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
    /// A web server, which is read-only.
    Http,
    /// A directory of this machine.
    Directory,
}

/// Why a text is not the address of a store. The message never contains a part that may be a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreUrlError {
    /// No such kind of store.
    #[error(
        "{0}:// is not a kind of store: use s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, http(s)://HOST/PREFIX, file:///PATH, or the path of a directory"
    )]
    Scheme(String),
    /// There is no scheme, or the rest is not valid.
    #[error("{0} does not read as the address of a store ({1}): it looks like s3://BUCKET/PREFIX")]
    Malformed(String, String),
    /// The part that names the bucket is empty.
    #[error("{0} names no bucket: it looks like {1}")]
    NoBucket(String, &'static str),
    /// `file://` with a host or a relative path.
    #[error("{0} names no directory of this machine: it looks like file:///PATH, with three slashes")]
    NoDirectory(String),
    /// Something before an `@`.
    #[error(
        "the address {scheme}://… has something before an '@'. Addresses are printed and logged, so they must not contain user names or keys. Take it out and set {instead}"
    )]
    Credentials {
        /// The address's scheme.
        scheme: String,
        /// The variables to set.
        instead: &'static str,
    },
    /// A `?` or a `#`.
    #[error(
        "the address {scheme}://… has a '?' or a '#' in it. Addresses are printed and logged, so they must not contain options or tokens. Take it out and set {instead}"
    )]
    Query {
        /// The address's scheme.
        scheme: String,
        /// The variables to set.
        instead: &'static str,
    },
    /// The prefix has `..`, `.` or empty components.
    #[error(
        "the prefix {0:?} has an empty part, '.' or '..' in it: write it plainly, such as team/checkpoints"
    )]
    Prefix(String),
}

impl Service {
    fn of_scheme(scheme: &str) -> Option<Self> {
        match scheme {
            "s3" => Some(Self::S3),
            "gs" => Some(Self::Gcs),
            "az" => Some(Self::Azure),
            "http" | "https" => Some(Self::Http),
            "file" => Some(Self::Directory),
            _ => None,
        }
    }

    /// The form of an address of this service.
    fn form(self) -> &'static str {
        match self {
            Self::S3 => "s3://BUCKET/PREFIX",
            Self::Gcs => "gs://BUCKET/PREFIX",
            Self::Azure => "az://CONTAINER/PREFIX",
            Self::Http => "https://HOST/PREFIX",
            Self::Directory => "file:///PATH",
        }
    }

    /// The environment variables with its credentials.
    #[must_use]
    pub fn variables(self) -> &'static str {
        match self {
            Self::S3 => {
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL for a service that is not Amazon's)"
            }
            Self::Gcs => "GOOGLE_APPLICATION_CREDENTIALS",
            Self::Azure => {
                "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY"
            }
            Self::Http | Self::Directory => "nothing: such a store takes no credentials",
        }
    }
}

impl StoreUrl {
    /// Whether `text` is an address rather than the path of a directory.
    #[must_use]
    pub fn is_address(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| !scheme.contains('/'))
    }

    /// The address that was meant by a path such as `s3:/bucket/prefix`: a scheme with too few slashes.
    #[must_use]
    pub fn misspelt(text: &str) -> Option<String> {
        let (scheme, rest) = text.split_once(':').filter(|_| !Self::is_address(text))?;
        let service = Service::of_scheme(&scheme.to_ascii_lowercase())?;
        let slashes = if service == Service::Directory { ":///" } else { "://" };
        Some(format!("{scheme}{slashes}{}", rest.trim_start_matches('/')))
    }

    /// Its service.
    #[must_use]
    pub fn service(&self) -> Service {
        self.service
    }

    /// The directory of a `file://` address.
    #[must_use]
    pub fn directory(&self) -> Option<PathBuf> {
        (self.service == Service::Directory).then(|| PathBuf::from(format!("/{}", self.prefix)))
    }

    /// The address of `path` below this one.
    #[must_use]
    pub fn below(&self, path: &RelPath) -> Self {
        let prefix =
            if self.prefix.is_empty() { path.to_string() } else { format!("{}/{path}", self.prefix) };
        Self { text: format!("{}/{path}", self.text), service: self.service, prefix }
    }

    /// The prefix in the bucket, or empty.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The address as the client library expects it.
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// The scheme and host only.
    pub(crate) fn origin(&self) -> &str {
        self.text.strip_suffix(&self.prefix).map_or(&self.text, |origin| origin.trim_end_matches('/'))
    }
}

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(text: &str) -> Result<Self, StoreUrlError> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(StoreUrlError::Malformed("this".to_owned(), "there is no '://' in it".to_owned()));
        };
        let scheme = scheme.to_ascii_lowercase();
        // The text before `://` may be a key: an unlikely scheme is not printed.
        let plain =
            !scheme.is_empty() && scheme.len() <= 16 && scheme.bytes().all(|b| b.is_ascii_alphanumeric());
        let service = Service::of_scheme(&scheme)
            .ok_or_else(|| StoreUrlError::Scheme(if plain { scheme.clone() } else { "…".to_owned() }))?;
        let instead = service.variables();
        if rest.contains('@') {
            return Err(StoreUrlError::Credentials { scheme, instead });
        }
        if rest.contains(['?', '#']) {
            return Err(StoreUrlError::Query { scheme, instead });
        }
        let text = format!("{scheme}://{}", rest.trim_end_matches('/'));
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        if service == Service::Directory {
            if !bucket.is_empty() || prefix.is_empty() {
                return Err(StoreUrlError::NoDirectory(text));
            }
        } else if bucket.is_empty() {
            return Err(StoreUrlError::NoBucket(format!("{scheme}://"), service.form()));
        }
        if !prefix.is_empty() && RelPath::new(prefix).is_err() {
            return Err(StoreUrlError::Prefix(prefix.to_owned()));
        }
        if service == Service::Directory {
            return Ok(Self { text, service, prefix: prefix.to_owned() });
        }
        Self::of_network(text)
    }
}

impl StoreUrl {
    /// Some services also have https:// addresses, which the client library recognises.
    fn of_network(text: String) -> Result<Self, StoreUrlError> {
        let malformed =
            |reason: &dyn fmt::Display| StoreUrlError::Malformed(text.clone(), reason.to_string());
        let url = Url::parse(&text).map_err(|error| malformed(&error))?;
        let (scheme, prefix) = ObjectStoreScheme::parse(&url).map_err(|error| malformed(&error))?;
        let service = match scheme {
            ObjectStoreScheme::AmazonS3 => Service::S3,
            ObjectStoreScheme::GoogleCloudStorage => Service::Gcs,
            ObjectStoreScheme::MicrosoftAzure => Service::Azure,
            _ => Service::Http,
        };
        Ok(Self { service, prefix: prefix.to_string(), text })
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> StoreUrl {
        text.parse().unwrap()
    }

    fn refused(text: &str) -> String {
        text.parse::<StoreUrl>().unwrap_err().to_string()
    }

    #[test]
    fn too_few_slashes_are_noticed() {
        assert_eq!(StoreUrl::misspelt("s3:/models/a").as_deref(), Some("s3://models/a"));
        assert_eq!(StoreUrl::misspelt("gs:models").as_deref(), Some("gs://models"));
        assert_eq!(StoreUrl::misspelt("file:/mnt/a").as_deref(), Some("file:///mnt/a"));
        for right in ["s3://models", "/mnt/a", "./s3:/a", "a:b", "file:///mnt"] {
            assert_eq!(StoreUrl::misspelt(right), None, "{right}");
        }
    }

    #[test]
    fn takes_each_kind() {
        for (text, service, prefix) in [
            ("s3://models/team/a", Service::S3, "team/a"),
            ("s3://models", Service::S3, ""),
            ("S3://models/", Service::S3, ""),
            ("gs://models/a/", Service::Gcs, "a"),
            ("az://models/a", Service::Azure, "a"),
            ("https://files.example/a/b", Service::Http, "a/b"),
            ("http://127.0.0.1:8080", Service::Http, ""),
            ("https://account.r2.cloudflarestorage.com/models/a", Service::S3, "a"),
        ] {
            let parsed = url(text);
            assert_eq!((parsed.service(), parsed.prefix()), (service, prefix), "{text}");
        }
        assert_eq!(url("file:///mnt/snapshots/").directory(), Some(PathBuf::from("/mnt/snapshots")));
        assert_eq!(url("s3://models").directory(), None);
    }

    #[test]
    fn goes_below_and_shows_itself() {
        let job = RelPath::new("jobs/a").unwrap();
        assert_eq!(url("s3://models/team/").below(&job).to_string(), "s3://models/team/jobs/a");
        assert_eq!(url("s3://models/team/").below(&job).prefix(), "team/jobs/a");
        assert_eq!(url("s3://models").below(&job).prefix(), "jobs/a");
        assert_eq!(url("https://files.example/a/b").origin(), "https://files.example");
        assert_eq!(url("https://files.example").origin(), "https://files.example");
    }

    #[test]
    fn tells_addresses_from_paths() {
        assert!(StoreUrl::is_address("s3://models") && StoreUrl::is_address("ftp://x"));
        assert!(
            !StoreUrl::is_address("/mnt/a")
                && !StoreUrl::is_address("a:b")
                && !StoreUrl::is_address("./a://b")
        );
    }

    #[test]
    fn refuses_invalid_addresses_with_the_reason() {
        for (text, reason) in [
            ("ftp://models/a", "ftp:// is not a kind of store"),
            ("models", "there is no '://'"),
            ("s3://", "s3:// names no bucket: it looks like s3://BUCKET/PREFIX"),
            ("s3:///a", "names no bucket"),
            ("az:///a", "az://CONTAINER/PREFIX"),
            ("file://host/a", "three slashes"),
            ("file://", "three slashes"),
            ("s3://models/a//b", "\"a//b\""),
            ("s3://models/../b", "\"../b\""),
            ("s3://models/./b", "'.'"),
            ("https://ho st/a", "does not read"),
        ] {
            assert!(refused(text).contains(reason), "{text}: {}", refused(text));
        }
    }

    #[test]
    fn secrets_are_refused_and_never_printed() {
        for text in [
            "s3://KEY:HUSHHUSH@models/a",
            "s3://KEY:HUSH/HUSH@models/a",
            "s3://models/a?X-Amz-Signature=HUSHHUSH",
            "az://models/a?sig=HUSHHUSH",
            "az://models/a#HUSHHUSH",
            "https://user:HUSHHUSH@host/",
            "user:HUSHHUSH://models",
            "HUSH@HUSH",
            "HUSHHUSHHUSHHUSHHUSH://models",
        ] {
            let error = text.parse::<StoreUrl>().unwrap_err();
            assert!(!format!("{error} {error:?}").to_uppercase().contains("HUSH"), "{text}: {error:?}");
        }
        assert!(refused("s3://k:s@b/a").contains("AWS_SECRET_ACCESS_KEY"));
        assert!(refused("az://b/a?sig=x").contains("AZURE_STORAGE_SAS_KEY"));
    }
}
