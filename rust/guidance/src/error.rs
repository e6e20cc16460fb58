//! What can go wrong, each with the place and what to do about it.
use std::io;
use std::path::{Path, PathBuf};

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of the store. `Display` is one line.
#[derive(Debug)]
pub enum Error {
    /// The operating system refused an operation on a file.
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done: `write`, `read`, `fsync` …
        op: &'static str,
        /// The system's own words.
        source: io::Error,
    },
    /// Bytes on disk do not pass their checks.
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Byte offset of the damaged structure.
        offset: u64,
        /// What failed.
        what: String,
    },
    /// A trajectory, site or token range that the dataset does not hold.
    Missing(String),
    /// The record belongs to other tokens than the caller's.
    Mismatch(String),
    /// A file of a newer format, or with a feature this build lacks.
    Unsupported(String),
    /// The caller's arguments do not fit the schema or each other.
    Usage(String),
    /// The writer's queue is full.
    Full(String),
    /// The writer failed earlier; the text repeats the first failure.
    Failed(String),
}

impl Error {
    /// An `Io` error of `op` on `path`.
    pub fn io(path: &Path, op: &'static str, source: io::Error) -> Self {
        Error::Io { path: path.to_owned(), op, source }
    }

    /// A `Corrupt` error at `offset` of `path`.
    pub fn corrupt(path: &Path, offset: u64, what: impl Into<String>) -> Self {
        Error::Corrupt { path: path.to_owned(), offset, what: what.into() }
    }

    /// The caller's mistake.
    pub fn usage(what: impl Into<String>) -> Self {
        Error::Usage(what.into())
    }
}

/// What to do about the system's refusals that are the user's to mend.
fn todo(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => "; check the path",
        io::ErrorKind::NotADirectory => "; give the folder that a writer wrote to",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "; check whether you may do this there",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "; make room there, then start a new writer: what was committed is readable"
        }
        _ => "",
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Io { path, op, source } => write!(f, "cannot {op} {}: {source}{}", path.display(), todo(source)),
            Error::Corrupt { path, offset, what } => {
                let name = path.display().to_string();
                let todo = match name.contains("://") {
                    true => "verify the folder that it was published from and publish it under another prefix",
                    false => "run `tracekit guidance verify` on its folder",
                };
                write!(f, "{name} is damaged at byte {offset}: {what}; {todo}")
            }
            Error::Missing(s)
            | Error::Mismatch(s)
            | Error::Unsupported(s)
            | Error::Usage(s)
            | Error::Full(s)
            | Error::Failed(s) => f.write_str(s),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
