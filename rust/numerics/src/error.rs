use std::fmt;

/// What was wrong with a call; the text says which argument, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Something that the profile does not have or cannot do without.
    Config(String),
    /// Lengths that do not fit together.
    Shape(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Config(text) | Error::Shape(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// An error if a slice is not as long as the shape says.
pub(crate) fn expect_len(what: &str, found: usize, expected: usize) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Shape(format!("{what} has {found} elements where the shape asks for {expected}")))
}
