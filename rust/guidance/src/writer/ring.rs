//! Blocks written by io_uring: the writer fills one while the kernel takes others.
use super::output::Aligned;
use io_uring::{opcode, types, IoUring};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;

/// Blocks that may be on their way.
const DEPTH: usize = 4;

/// A block on its way.
struct Flight {
    buffer: Aligned,
    len: usize,
    at: u64,
}

/// A queue of writes to one file.
pub struct Ring {
    ring: IoUring,
    flights: [Option<Flight>; DEPTH],
    spare: Vec<Aligned>,
}

/// A write that the kernel refused or did in part.
pub struct Left {
    /// The whole block; it is written again.
    pub buffer: Aligned,
    /// Its bytes.
    pub len: usize,
    /// Its place in the file.
    pub at: u64,
    /// What the kernel said; `None` after a short write.
    pub error: Option<Error>,
}

impl Ring {
    /// A ring, if the kernel gives one.
    pub fn new() -> Result<Self> {
        Ok(Ring { ring: IoUring::new(DEPTH as u32)?, flights: Default::default(), spare: Vec::new() })
    }

    /// Sends the first `len` bytes of `buffer` to `at` and returns a buffer to go on with. Waits if too many are on
    /// their way; what of those is left to do goes to `left`.
    pub fn send(
        &mut self,
        file: &File,
        buffer: Aligned,
        len: usize,
        at: u64,
        left: &mut impl FnMut(Left) -> Result<Aligned>,
    ) -> Result<Aligned> {
        let slot = loop {
            match self.flights.iter().position(Option::is_none) {
                Some(slot) => break slot,
                None => self.wait(left)?,
            }
        };
        let flight = self.flights[slot].insert(Flight { buffer, len, at });
        let fd = types::Fd(file.as_raw_fd());
        let entry = opcode::Write::new(fd, flight.buffer.bytes().as_ptr(), len as u32).offset(at).build();
        // SAFETY: the buffer stays in `flights` until its completion is seen.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        if pushed.is_err() {
            self.flights[slot] = None;
            return Err(Error::other("the submission queue is full"));
        }
        self.ring.submit()?;
        Ok(self.spare.pop().unwrap_or_else(Aligned::block))
    }

    /// Waits until nothing is on its way.
    pub fn drain(&mut self, left: &mut impl FnMut(Left) -> Result<Aligned>) -> Result<()> {
        while self.flights.iter().any(Option::is_some) {
            self.wait(left)?;
        }
        Ok(())
    }

    fn wait(&mut self, left: &mut impl FnMut(Left) -> Result<Aligned>) -> Result<()> {
        match self.ring.submit_and_wait(1) {
            Err(e) if e.kind() != ErrorKind::Interrupted => return Err(e),
            _ => {}
        }
        let done: Vec<(usize, i32)> = self.ring.completion().map(|c| (c.user_data() as usize, c.result())).collect();
        let mut result = Ok(());
        for (slot, code) in done {
            let Some(Flight { buffer, len, at }) = self.flights.get_mut(slot).and_then(Option::take) else { continue };
            if code as usize == len && code >= 0 {
                self.spare.push(buffer);
                continue;
            }
            let error = (code < 0).then(|| Error::from_raw_os_error(-code));
            match left(Left { buffer, len, at, error }) {
                Ok(buffer) => self.spare.push(buffer),
                Err(e) => result = Err(e),
            }
        }
        result
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel reads the buffers until their writes are done.
        if self.drain(&mut |left| Ok(left.buffer)).is_err() {
            self.flights.iter_mut().filter_map(Option::take).for_each(std::mem::forget);
        }
    }
}
