//! How a writer behaves, what begins a trajectory, what a writer counts.
/// When written data must survive a power loss. A killed process loses nothing committed in any mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// When a segment is sealed.
    Seal,
    /// At a commit, if the last time is a second ago.
    Interval,
    /// At every commit.
    Commit,
}

/// What happens to rows that find the queue full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// The producer waits.
    Block,
    /// The trajectory is given up and counted.
    Drop,
    /// The producer gets [`Error::Full`] and may repeat the call.
    Raise,
}

/// How bytes get to a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// By `write`, through the page cache.
    #[default]
    Buffered,
    /// Past the page cache (O_DIRECT), where the file system can; otherwise buffered.
    Direct,
    /// By io_uring, where the kernel and this build (feature `uring`) can; otherwise buffered.
    Uring,
}

/// How a writer behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// When to fsync.
    pub sync: Sync,
    /// Segments roll over at this size.
    pub roll_bytes: u64,
    /// Bytes of packed rows that may wait.
    pub queue_bytes: usize,
    /// What happens beyond them.
    pub on_full: OnFull,
    /// Threads that encode.
    pub threads: usize,
    /// Whether every seal is followed by a new manifest of the folder.
    pub manifest: bool,
    /// Whether segments lie in a sub-folder of the writer's, one of 256, so that no folder holds too many.
    pub fan_out: bool,
    /// How segments get to their files.
    pub mode: Mode,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            sync: Sync::Seal,
            roll_bytes: 4 << 30,
            queue_bytes: 2 << 30,
            on_full: OnFull::Block,
            threads: 1,
            manifest: false,
            fan_out: false,
            mode: Mode::Buffered,
        }
    }
}

/// What begins a trajectory.
#[derive(Clone, Debug, Default)]
pub struct Begin<'a> {
    /// Its id, 1 to 255 bytes.
    pub id: &'a str,
    /// Token ids from token 0 on, those of the prefix included.
    pub token_ids: &'a [i64],
    /// Policy version that sampled it.
    pub policy: i64,
    /// The record that holds its first tokens, and their number.
    pub prefix: Option<(&'a str, u32)>,
    /// Number of this part and number of parts; `(0, 1)` for a trajectory written by one rank.
    pub part: (u16, u16),
}

/// Counts of a writer.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Bytes of all segments.
    pub bytes: u64,
    /// Committed trajectories.
    pub trajectories: u64,
    /// Committed tokens.
    pub tokens: u64,
    /// Trajectories given up: abandoned, never committed, or with the queue full.
    pub dropped: u64,
    /// Segments.
    pub segments: u64,
    /// Segments that are written in the mode that was asked for.
    pub as_asked: u64,
    /// Bytes waiting.
    pub queued: u64,
    /// Most bytes that ever waited.
    pub queued_peak: u64,
    /// Times a producer waited for room.
    pub stalls: u64,
}
