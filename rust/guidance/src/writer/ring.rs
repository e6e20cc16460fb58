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

#[cfg(test)]
mod tests {
    //! Failures as the kernel reports them: as results of writes that it had taken.
    use super::super::output::Output;
    use super::super::Mode;
    use super::*;
    use std::fs::OpenOptions;
    use std::io::{IoSlice, Read};
    use std::os::fd::FromRawFd;

    const BLOCK: usize = 1 << 20;

    fn ring() -> Option<Ring> {
        let ring = Ring::new();
        if let Err(e) = &ring {
            eprintln!("skipped: the kernel gives no io_uring ({e})");
        }
        ring.ok()
    }

    fn failure(path: &str) -> Option<i32> {
        ring()?;
        let mut out = Output::new(OpenOptions::new().write(true).open(path).unwrap(), Mode::Uring);
        assert_eq!(out.mode(), Mode::Uring);
        out.write(&mut [IoSlice::new(&vec![7; BLOCK])]).expect("the kernel takes the block");
        let error = out.flush().expect_err("and cannot write it");
        error.raw_os_error()
    }

    #[test]
    fn a_full_device_is_an_error_of_the_flush() {
        assert!(failure("/dev/full").is_none_or(|e| e == libc::ENOSPC));
    }

    #[test]
    fn an_io_error_is_an_error_of_the_flush() {
        // Nothing is mapped at address 0.
        assert!(failure("/proc/self/mem").is_none_or(|e| e == libc::EIO));
    }

    #[test]
    fn an_error_comes_up_at_the_latest_when_the_queue_is_full() {
        if ring().is_none() {
            return;
        }
        let mut out = Output::new(OpenOptions::new().write(true).open("/dev/full").unwrap(), Mode::Uring);
        let block = vec![7; BLOCK];
        let taken = (0..=DEPTH).take_while(|_| out.write(&mut [IoSlice::new(&block)]).is_ok()).count();
        assert_eq!(taken, DEPTH);
    }

    /// A pipe that takes 64 KiB of a block and no more.
    fn pipe() -> (File, File) {
        let mut ends = [0; 2];
        // SAFETY: the call fills in two descriptors, which are ours.
        unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_NONBLOCK), 0);
            (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        }
    }

    #[test]
    fn a_short_write_hands_the_whole_block_back_to_be_written_again() {
        let Some(mut ring) = ring() else { return };
        let (mut reader, file) = pipe();
        let mut block = Aligned::block();
        block.bytes().iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
        let mut seen = Vec::new();
        let mut left = |mut l: Left| {
            assert!(l.error.is_none(), "{:?}", l.error);
            seen.push((l.at, l.len, l.buffer.bytes().to_vec()));
            Ok(l.buffer)
        };
        ring.send(&file, block, BLOCK, 0, &mut left).unwrap();
        ring.drain(&mut left).unwrap();
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].0, seen[0].1), (0, BLOCK));
        drop(file);
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert!(!got.is_empty() && got.len() < BLOCK, "{} bytes", got.len());
        assert!(got[..] == seen[0].2[..got.len()]);
    }

    #[test]
    fn what_a_short_write_left_is_done_at_its_place() {
        let path = std::env::temp_dir().join(format!("tracekit-ring-{}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let mut buffer = Aligned::block();
        buffer.bytes().fill(9);
        super::super::output::rewrite(&file, Left { buffer, len: 4096, at: 512, error: None }).unwrap();
        let got = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(got.len() == 4608 && got[..512].iter().all(|b| *b == 0) && got[512..].iter().all(|b| *b == 9));
    }
}
