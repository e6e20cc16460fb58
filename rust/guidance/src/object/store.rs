//! One prefix of an object store, with its client and the threads that serve it.
use super::Options;
use crate::error::{Error, Result};
use crate::manifest::{ENTRY, HEAD, MAX_SEGMENTS, TAIL};
use crate::source::{coalesce, Blocks, ReadAt};
use object_store::aws::AmazonS3Builder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, PutOptions, PutPayload, RetryConfig};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// Requests that run at once.
const PARALLEL: usize = 8;
/// Largest request, and a part of an upload.
const PIECE: u64 = 16 << 20;

type Raw<T> = object_store::Result<T>;

/// What does not survive a fork.
struct Live {
    pid: u32,
    runtime: Runtime,
    client: Arc<dyn ObjectStore>,
    root: Path,
}

/// One prefix of an object store. Credentials and endpoint come from the environment: `AWS_ACCESS_KEY_ID`,
/// `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL` … or `GOOGLE_APPLICATION_CREDENTIALS`.
pub struct Store {
    url: String,
    options: Options,
    live: Mutex<Option<Arc<Live>>>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.url)
    }
}

fn connect(url: &str, options: &Options) -> Raw<(Arc<dyn ObjectStore>, Path)> {
    let parsed =
        url::Url::parse(url).map_err(|e| object_store::Error::Generic { store: "url", source: Box::new(e) })?;
    let retry =
        RetryConfig { max_retries: options.retries, retry_timeout: Duration::from_secs(60), ..RetryConfig::default() };
    if parsed.scheme() == "file" {
        let (client, root) = object_store::parse_url(&parsed)?;
        return Ok((client.into(), root));
    }
    let root = Path::from_url_path(parsed.path())?;
    if parsed.scheme() == "gs" {
        let client = GoogleCloudStorageBuilder::from_env().with_url(url).with_retry(retry).build()?;
        return Ok((Arc::new(client), root));
    }
    let mut builder = AmazonS3Builder::from_env().with_url(url).with_retry(retry);
    let endpoint =
        ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"].iter().find_map(|k| std::env::var(k).ok());
    if let Some(endpoint) = endpoint {
        let whole = url::Url::parse(&endpoint).is_ok_and(|u| u.has_host() && u.scheme().starts_with("http"));
        if !whole {
            let text = format!("AWS_ENDPOINT_URL is '{endpoint}': use http://host:port or https://host");
            return Err(object_store::Error::Generic { store: "S3", source: text.into() });
        }
        builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
    }
    Ok((Arc::new(builder.build()?), root))
}

/// The first line of an error, not all of a server's page.
fn short(e: &dyn std::fmt::Display) -> String {
    let text = e.to_string();
    text.lines().next().unwrap_or_default().chars().take(400).collect()
}

/// One range of one object, whole: a body that ends early is asked for again.
async fn range_of(client: &dyn ObjectStore, path: &Path, range: Range<u64>) -> Raw<Vec<u8>> {
    let want = (range.end - range.start) as usize;
    let mut tries = 3;
    loop {
        tries -= 1;
        let got = match client.get_range(path, range.clone()).await {
            Ok(bytes) if bytes.len() == want => return Ok(bytes.into()),
            Ok(bytes) => {
                let text = format!("bytes {}..{} ended after {}", range.start, range.end, bytes.len());
                object_store::Error::Generic { store: "object", source: text.into() }
            }
            Err(e @ object_store::Error::Generic { .. }) => e,
            Err(e) => return Err(e),
        };
        if tries == 0 {
            return Err(got);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

impl Store {
    /// The prefix that `url` names. Nothing is asked of the store yet.
    pub fn new(url: &str, options: Options) -> Result<Self> {
        let store = Store { url: url.trim_end_matches('/').to_owned(), options, live: Mutex::new(None) };
        store.live()?;
        Ok(store)
    }

    /// The url.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The whole key of an object, as errors name it.
    pub fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.url)
    }

    /// The client of this process: neither its threads nor its connections are usable after a fork.
    fn live(&self) -> Result<Arc<Live>> {
        let mut live = self.live.lock().unwrap_or_else(|e| e.into_inner());
        match live.take() {
            Some(have) if have.pid == std::process::id() => *live = Some(have),
            stale => {
                std::mem::forget(stale);
                let (client, root) = connect(&self.url, &self.options)
                    .map_err(|e| Error::Failed(format!("cannot use {}: {}; check the url", self.url, short(&e))))?;
                let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
                let runtime = runtime.map_err(|e| Error::io(self.url.as_ref(), "start threads for", e))?;
                *live = Some(Arc::new(Live { pid: std::process::id(), runtime, client, root }));
            }
        }
        Ok(live.as_ref().expect("just set").clone())
    }

    /// What went wrong with which object, and what to do.
    fn explain(&self, op: &str, name: &str, e: object_store::Error) -> Error {
        use object_store::Error as E;
        let (key, text) = (self.key(name), short(&e));
        // A list's refusals come as text only; a client without credentials asks the cloud machine's own service.
        let refused = ["status code: 401", "status code: 403", "//169.254.", "//metadata"];
        match e {
            E::NotFound { .. } => Error::Missing(format!(
                "{key} is not there: it was deleted or never published; publish the folder that it comes from again"
            )),
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => self.refuses(op, &key, &text),
            _ if refused.iter().any(|part| text.contains(part)) => self.refuses(op, &key, &text),
            _ if text.contains("status code: 404") => {
                Error::Failed(format!("cannot {op} {key}: {text}; check the bucket's name and the endpoint"))
            }
            _ => Error::Failed(format!("cannot {op} {key}: {text}; try again, or check the endpoint and the network")),
        }
    }

    fn refuses(&self, op: &str, key: &str, text: &str) -> Error {
        Error::Failed(format!(
            "the store refuses to {op} {key}: {text}; check the credentials in the environment (AWS_ACCESS_KEY_ID … or \
             GOOGLE_APPLICATION_CREDENTIALS)"
        ))
    }

    /// Names of the objects directly under the prefix.
    pub fn names(&self) -> Result<Vec<String>> {
        let live = self.live()?;
        let list = live.runtime.block_on(live.client.list_with_delimiter(Some(&live.root)));
        let list = list.map_err(|e| self.explain("list", "", e))?;
        Ok(list.objects.iter().filter_map(|o| o.location.filename().map(str::to_owned)).collect())
    }

    /// A small object, whole.
    pub fn get(&self, name: &str) -> Result<Vec<u8>> {
        const MOST: u64 = (HEAD + ENTRY * MAX_SEGMENTS + TAIL) as u64;
        let live = self.live()?;
        let path = live.root.child(name);
        let got = live.runtime.block_on(async {
            let meta = live.client.head(&path).await?;
            if meta.size > MOST {
                let source = format!("it has {} bytes, at most {MOST} are read", meta.size).into();
                return Err(object_store::Error::Generic { store: "object", source });
            }
            if meta.size == 0 {
                return Ok(Vec::new());
            }
            range_of(&*live.client, &path, 0..meta.size).await
        });
        got.map_err(|e| self.explain("read", name, e))
    }

    /// Ranges of objects, several requests at once, in the order asked for.
    pub fn ranges(&self, wanted: &[(&str, Range<u64>)]) -> Result<Vec<Vec<u8>>> {
        let live = self.live()?;
        let gate = Arc::new(Semaphore::new(PARALLEL));
        let got = live.runtime.block_on(async {
            let mut set = JoinSet::new();
            for (i, (name, range)) in wanted.iter().enumerate() {
                let (client, gate) = (live.client.clone(), gate.clone());
                let (path, range) = (live.root.child(*name), range.clone());
                set.spawn(async move {
                    let _turn = gate.acquire_owned().await;
                    (i, range_of(&*client, &path, range).await)
                });
            }
            let mut out = vec![Vec::new(); wanted.len()];
            while let Some(done) = set.join_next().await {
                let (i, bytes) = done.expect("a read does not panic");
                out[i] = bytes.map_err(|e| (i, e))?;
            }
            Ok(out)
        });
        got.map_err(|(i, e): (usize, _)| self.explain("read", wanted[i].0, e))
    }

    /// Uploads a file of `len` bytes in parts.
    pub fn upload(&self, name: &str, file: &std::path::Path, len: u64) -> Result<()> {
        let live = self.live()?;
        let path = live.root.child(name);
        let sent = live.runtime.block_on(async {
            let failed = |e: io::Error| object_store::Error::Generic { store: "file", source: Box::new(e) };
            let mut source = tokio::fs::File::open(file).await.map_err(failed)?;
            if len <= PIECE {
                let mut bytes = vec![0; len as usize];
                source.read_exact(&mut bytes).await.map_err(failed)?;
                live.client.put(&path, PutPayload::from(bytes)).await?;
            } else {
                let mut parts = live.client.put_multipart(&path).await?;
                let mut at = 0;
                while at < len {
                    let mut bytes = vec![0; PIECE.min(len - at) as usize];
                    let part = match source.read_exact(&mut bytes).await {
                        Ok(_) => parts.put_part(PutPayload::from(bytes)).await,
                        Err(e) => Err(failed(e)),
                    };
                    if let Err(e) = part {
                        parts.abort().await.ok();
                        return Err(e);
                    }
                    at += PIECE;
                }
                parts.complete().await?;
            }
            live.client.head(&path).await.map(|meta| meta.size)
        });
        match sent {
            Ok(size) if size == len => Ok(()),
            Ok(size) => Err(Error::Failed(format!(
                "{} has {size} bytes after an upload of {len}: publish again",
                self.key(name)
            ))),
            Err(e) => Err(self.explain("write", name, e)),
        }
    }

    /// Writes a small object if there is none of that name: `false` if there is. A store that cannot promise that
    /// writes it in any case.
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        use object_store::Error as E;
        let live = self.live()?;
        let path = live.root.child(name);
        let put = |mode| {
            let options = PutOptions { mode, ..PutOptions::default() };
            live.runtime.block_on(live.client.put_opts(&path, PutPayload::from(bytes.to_vec()), options))
        };
        let result = match put(PutMode::Create) {
            Err(E::NotImplemented | E::NotSupported { .. }) => put(PutMode::Overwrite),
            other => other,
        };
        match result {
            Ok(_) => Ok(true),
            Err(E::AlreadyExists { .. } | E::Precondition { .. }) => Ok(false),
            Err(e) => Err(self.explain("write", name, e)),
        }
    }
}

/// One object.
#[derive(Debug)]
pub struct Object {
    /// Where it is.
    pub store: Arc<Store>,
    /// Its name under the prefix.
    pub name: String,
}

impl ReadAt for Object {
    fn read_exact_at(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let range = at..at.saturating_add(buf.len() as u64);
        let got = self.store.ranges(&[(&self.name, range)]).map_err(io::Error::other)?;
        buf.copy_from_slice(&got[0]);
        Ok(())
    }

    fn fetch(&self, ranges: &[Range<u64>]) -> io::Result<Option<Blocks>> {
        let joined = coalesce(ranges, self.store.options.gap, PIECE);
        let wanted: Vec<(&str, Range<u64>)> = joined.iter().map(|r| (self.name.as_str(), r.clone())).collect();
        let got = self.store.ranges(&wanted).map_err(io::Error::other)?;
        Ok(Some(Blocks::new(joined.iter().map(|r| r.start).zip(got).collect())))
    }

    fn remote(&self) -> bool {
        true
    }
}
