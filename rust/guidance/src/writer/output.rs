//! Where a segment's bytes go: straight to the operating system, in aligned blocks past the page cache (O_DIRECT), or
//! in blocks by io_uring.
use super::Mode;
use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Result, Write};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::FileExt;

/// Bytes that are written at once past the page cache.
const BLOCK: usize = 1 << 20;
/// The largest alignment that direct writes may ask for.
const MAX_ALIGN: usize = 64 << 10;

/// A file that is only appended to.
pub struct Output {
    file: File,
    written: u64,
    blocks: Option<Blocks>,
}

/// The end of the file, of which whole blocks are written.
struct Blocks {
    #[cfg(feature = "uring")]
    ring: Option<super::ring::Ring>,
    buffer: Aligned,
    align: usize,
    /// Where the buffer lies in the file: a multiple of `align`.
    at: u64,
    /// Bytes in it.
    fill: usize,
    /// Of those, bytes that were flushed before: they were part of a block.
    flushed: usize,
    direct: bool,
}

impl Output {
    /// Appends to the empty `file`: with O_DIRECT if the file system has it, by io_uring if the kernel and this build
    /// have that.
    pub fn new(file: File, mode: Mode) -> Self {
        let align = alignment(&file).filter(|_| mode == Mode::Direct && set_direct(&file, true));
        let blocks = |align| Blocks {
            #[cfg(feature = "uring")]
            ring: None,
            buffer: Aligned::block(),
            align,
            at: 0,
            fill: 0,
            flushed: 0,
            direct: mode == Mode::Direct,
        };
        #[cfg(feature = "uring")]
        if mode == Mode::Uring {
            let ring = super::ring::Ring::new().ok();
            let blocks = ring.map(|ring| Blocks { ring: Some(ring), ..blocks(1) });
            return Output { file, written: 0, blocks };
        }
        Output { file, written: 0, blocks: align.map(blocks) }
    }

    /// How bytes really get to the file.
    pub fn mode(&self) -> Mode {
        match &self.blocks {
            Some(blocks) if blocks.direct => Mode::Direct,
            #[cfg(feature = "uring")]
            Some(blocks) if blocks.ring.is_some() => Mode::Uring,
            _ => Mode::Buffered,
        }
    }

    /// Bytes appended so far.
    pub fn len(&self) -> u64 {
        self.written
    }

    /// Appends `parts`, in order. They are with the operating system after the next [`flush`](Self::flush).
    pub fn write(&mut self, parts: &mut [IoSlice]) -> Result<()> {
        self.written += parts.iter().map(|p| p.len() as u64).sum::<u64>();
        match &mut self.blocks {
            Some(blocks) => parts.iter().try_for_each(|p| blocks.push(&self.file, p)),
            None => write_all(&mut self.file, parts),
        }
    }

    /// Hands everything to the operating system; a last block that is not full is written with zeros behind its bytes.
    pub fn flush(&mut self) -> Result<()> {
        match &mut self.blocks {
            Some(blocks) => blocks.flush(&self.file),
            None => Ok(()),
        }
    }

    /// Makes everything flushed survive a power loss.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data()
    }

    /// Flushes, cuts the zeros off, syncs and closes. Closing says what went wrong, which dropping the file would not:
    /// some network file systems report there.
    /// The error comes with the name of what failed.
    pub fn close(mut self) -> std::result::Result<(), (&'static str, std::io::Error)> {
        self.flush().map_err(|e| ("write", e))?;
        if self.blocks.is_some() {
            self.file.set_len(self.written).map_err(|e| ("truncate", e))?;
        }
        self.file.sync_all().map_err(|e| ("fsync", e))?;
        // SAFETY: the descriptor is ours alone and is not used again.
        match unsafe { libc::close(self.file.into_raw_fd()) } {
            0 => Ok(()),
            _ => Err(("close", std::io::Error::last_os_error())),
        }
    }
}

fn write_all(file: &mut File, mut left: &mut [IoSlice]) -> Result<()> {
    IoSlice::advance_slices(&mut left, 0); // empty parts at the front would look like a write of nothing
    while !left.is_empty() {
        match file.write_vectored(left) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => IoSlice::advance_slices(&mut left, n),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl Blocks {
    fn push(&mut self, file: &File, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let n = bytes.len().min(BLOCK - self.fill);
            self.buffer.bytes()[self.fill..self.fill + n].copy_from_slice(&bytes[..n]);
            self.fill += n;
            bytes = &bytes[n..];
            if self.fill == BLOCK {
                self.send(file)?;
                self.at += BLOCK as u64;
                (self.fill, self.flushed) = (0, 0);
            }
        }
        Ok(())
    }

    /// Writes the full buffer.
    #[cfg(feature = "uring")]
    fn send(&mut self, file: &File) -> Result<()> {
        let Some(ring) = &mut self.ring else { return self.write(file, BLOCK) };
        let full = std::mem::replace(&mut self.buffer, Aligned::empty());
        self.buffer = ring.send(file, full, BLOCK, self.at, &mut |left| rewrite(file, left))?;
        Ok(())
    }

    #[cfg(not(feature = "uring"))]
    fn send(&mut self, file: &File) -> Result<()> {
        self.write(file, BLOCK)
    }

    fn flush(&mut self, file: &File) -> Result<()> {
        #[cfg(feature = "uring")]
        if let Some(ring) = &mut self.ring {
            ring.drain(&mut |left| rewrite(file, left))?;
        }
        if self.fill == self.flushed {
            return Ok(());
        }
        let end = self.fill.next_multiple_of(self.align);
        let fill = self.fill;
        self.buffer.bytes()[fill..end].fill(0);
        self.write(file, end)?;
        // The last block is written again with what follows; its first bytes stay the same, so that a drive which writes
        // sectors as a whole never loses them.
        let whole = fill / self.align * self.align;
        self.buffer.bytes().copy_within(whole..fill, 0);
        self.at += whole as u64;
        self.fill -= whole;
        self.flushed = self.fill;
        Ok(())
    }

    /// Writes the first `n` bytes. A file system that refuses these blocks after all gets them through the page cache.
    fn write(&mut self, file: &File, n: usize) -> Result<()> {
        match file.write_all_at(&self.buffer.bytes()[..n], self.at) {
            Err(e) if self.direct && e.raw_os_error() == Some(libc::EINVAL) && set_direct(file, false) => {
                self.direct = false;
                file.write_all_at(&self.buffer.bytes()[..n], self.at)
            }
            result => result,
        }
    }
}

/// Does what is left of a block after a short write.
#[cfg(feature = "uring")]
pub(super) fn rewrite(file: &File, mut left: super::ring::Left) -> Result<Aligned> {
    match left.error {
        Some(e) if e.kind() != ErrorKind::Interrupted => Err(e),
        _ => {
            file.write_all_at(&left.buffer.bytes()[..left.len], left.at)?;
            Ok(left.buffer)
        }
    }
}

/// Memory at an aligned address.
pub struct Aligned {
    at: *mut u8,
    layout: Layout,
}

// SAFETY: the memory belongs to the value alone.
unsafe impl Send for Aligned {}

impl Aligned {
    /// A zeroed buffer of one block, aligned for every file system.
    pub fn block() -> Self {
        Self::new(BLOCK, MAX_ALIGN)
    }

    #[cfg(feature = "uring")]
    fn empty() -> Self {
        Self::new(1, 1)
    }

    fn new(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len, align).expect("a power of two");
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) };
        if at.is_null() {
            handle_alloc_error(layout);
        }
        Aligned { at, layout }
    }

    /// The memory.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.layout.size()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { dealloc(self.at, self.layout) };
    }
}

/// The alignment that direct writes to `file` need; `None` if its file system has none to offer.
#[cfg(target_os = "linux")]
fn alignment(file: &File) -> Option<usize> {
    const TMPFS: libc::__fsword_t = 0x0102_1994; // takes the flag and copies all the same
    let fd = file.as_raw_fd();
    // SAFETY: both structures are plain data that the calls fill in.
    let (mut status, mut system): (libc::statx, libc::statfs) = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is a C string, the structures are ours.
    let asked = unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &mut status) } == 0;
    if asked && status.stx_mask & libc::STATX_DIOALIGN != 0 {
        let need = status.stx_dio_mem_align.max(status.stx_dio_offset_align) as usize;
        return (need > 0).then(|| need.next_power_of_two().max(4096)).filter(|need| *need <= MAX_ALIGN);
    }
    // SAFETY: as above.
    let known = unsafe { libc::fstatfs(fd, &mut system) } == 0;
    (known && system.f_type != TMPFS).then_some(4096)
}

#[cfg(target_os = "linux")]
fn set_direct(file: &File, on: bool) -> bool {
    let fd = file.as_raw_fd();
    // SAFETY: flags of a descriptor of ours.
    unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        let flags = if on { flags | libc::O_DIRECT } else { flags & !libc::O_DIRECT };
        libc::fcntl(fd, libc::F_SETFL, flags) == 0
    }
}

#[cfg(not(target_os = "linux"))]
fn alignment(_: &File) -> Option<usize> {
    None
}

#[cfg(not(target_os = "linux"))]
fn set_direct(_: &File, _: bool) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Appends of every length around a block's size, flushed or not, give the bytes that were appended.
    fn appended(dir: &std::path::Path, mode: Mode) -> Mode {
        let path = dir.join(format!("tracekit-output-{}-{mode:?}", std::process::id()));
        let bytes: Vec<u8> = (0..13 << 20).map(|i: u32| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
        let mut out = Output::new(File::create(&path).unwrap(), mode);
        let used = out.mode();
        let mut at = 0;
        for (k, n) in (1..8193).step_by(61).chain([0, BLOCK - 1, 4096, BLOCK + 1, 17, 9 * BLOCK]).enumerate() {
            let half = n / 2;
            let (a, b) = bytes[at..at + n].split_at(half);
            out.write(&mut [IoSlice::new(&[]), IoSlice::new(a), IoSlice::new(b)]).unwrap();
            at += n;
            if k % 3 == 0 {
                out.flush().unwrap();
                let now = std::fs::read(&path).unwrap();
                assert!(now[..at] == bytes[..at] && now[at..].iter().all(|b| *b == 0));
            }
        }
        assert_eq!(out.len(), at as u64);
        out.close().unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes[..at]);
        std::fs::remove_file(&path).unwrap();
        used
    }

    #[test]
    fn what_is_appended_is_in_the_file() {
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let target = here.join("../../target");
        let dir = if target.is_dir() { target } else { std::env::temp_dir() };
        assert_eq!(appended(&dir, Mode::Buffered), Mode::Buffered);
        appended(&dir, Mode::Direct);
        assert!(cfg!(feature = "uring") || appended(&dir, Mode::Uring) == Mode::Buffered);
        #[cfg(feature = "uring")]
        if super::super::ring::Ring::new().is_ok() {
            assert_eq!(appended(&dir, Mode::Uring), Mode::Uring);
        }
        let shm = std::path::Path::new("/dev/shm");
        if shm.is_dir() {
            assert_eq!(appended(shm, Mode::Direct), Mode::Buffered, "tmpfs has no direct writes");
        }
    }
}
