//! The commit of a trajectory.
use crate::error::{Error, Result};
use crate::layout::{i64_at, put, u16_at, u32_at};

/// How a trajectory ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Status {
    /// To its end.
    #[default]
    Complete,
    /// At a limit.
    Truncated,
    /// By an abort; its rows are whole as far as they go.
    Aborted,
}

impl Status {
    /// The name in Python.
    pub fn name(self) -> &'static str {
        ["complete", "truncated", "aborted"][self as usize]
    }

    /// The status of that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "complete" => Ok(Status::Complete),
            "truncated" => Ok(Status::Truncated),
            "aborted" => Ok(Status::Aborted),
            _ => Err(Error::Usage(format!("unknown status '{name}': use complete, truncated or aborted"))),
        }
    }

    pub(crate) fn from_byte(b: u8) -> Option<Self> {
        [Status::Complete, Status::Truncated, Status::Aborted].get(b as usize).copied()
    }
}

/// A trajectory's commit record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traj {
    /// Number in the segment.
    pub number: u32,
    /// End of the recorded tokens.
    pub n_tokens: u32,
    /// Length of the token ids, unrecorded last token included.
    pub n_ids: u32,
    /// First recorded token: the length of the prefix.
    pub first: u32,
    /// Chunks.
    pub n_chunks: u32,
    /// Oldest policy version of its tokens.
    pub policy_min: i64,
    /// Newest policy version.
    pub policy_max: i64,
    /// How it ended.
    pub status: Status,
    /// Number of this part, for trajectories written by several ranks.
    pub part: u16,
    /// Parts that make it complete.
    pub parts: u16,
    /// The trajectory's id.
    pub id: String,
    /// The record that holds tokens before `first`; empty if there is none.
    pub prefix: String,
    /// The user's msgpack.
    pub extra: Vec<u8>,
}

const TRAJ_FIXED: usize = 44;

impl Traj {
    /// The payload of a TRAJ record.
    pub fn encode(&self) -> Vec<u8> {
        let mut b = vec![0u8; TRAJ_FIXED];
        put(&mut b, 0, &self.n_tokens.to_le_bytes());
        put(&mut b, 4, &self.n_ids.to_le_bytes());
        put(&mut b, 8, &self.first.to_le_bytes());
        put(&mut b, 12, &self.n_chunks.to_le_bytes());
        put(&mut b, 16, &self.policy_min.to_le_bytes());
        put(&mut b, 24, &self.policy_max.to_le_bytes());
        b[32] = self.status as u8;
        b[33] = self.id.len() as u8;
        b[34] = self.prefix.len() as u8;
        put(&mut b, 36, &self.part.to_le_bytes());
        put(&mut b, 38, &self.parts.to_le_bytes());
        put(&mut b, 40, &(self.extra.len() as u32).to_le_bytes());
        b.extend_from_slice(self.id.as_bytes());
        b.extend_from_slice(self.prefix.as_bytes());
        b.extend_from_slice(&self.extra);
        b
    }

    /// Parses the payload of TRAJ record number `number`.
    pub fn decode(number: u32, b: &[u8]) -> Option<Self> {
        if b.len() < TRAJ_FIXED {
            return None;
        }
        let (id_len, prefix_len, extra_len) = (b[33] as usize, b[34] as usize, u32_at(b, 40) as usize);
        if b.len() - TRAJ_FIXED != id_len + prefix_len + extra_len {
            return None;
        }
        let text = |at: usize, len: usize| std::str::from_utf8(&b[at..at + len]).ok().map(str::to_owned);
        Some(Traj {
            number,
            n_tokens: u32_at(b, 0),
            n_ids: u32_at(b, 4),
            first: u32_at(b, 8),
            n_chunks: u32_at(b, 12),
            policy_min: i64_at(b, 16),
            policy_max: i64_at(b, 24),
            status: Status::from_byte(b[32])?,
            part: u16_at(b, 36),
            parts: u16_at(b, 38),
            id: text(TRAJ_FIXED, id_len)?,
            prefix: text(TRAJ_FIXED + id_len, prefix_len)?,
            extra: b[TRAJ_FIXED + id_len + prefix_len..].to_vec(),
        })
    }
}
