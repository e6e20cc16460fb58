//! Rows of an engine's cache by slot: one array as large as the cache, which never grows.

/// A row of `row_bytes` bytes and a policy version for each slot.
pub struct Slots {
    rows: Vec<u8>,
    versions: Vec<i64>,
    row_bytes: usize,
}

/// Why rows could not be taken or kept.
#[derive(Debug, PartialEq, Eq)]
pub enum SlotError {
    /// No such slot.
    Outside(i64),
    /// Nothing has filled it.
    Empty(i64),
    /// Rows and slots, or rows and their width, do not fit.
    Sizes {
        /// Slots that were named.
        slots: usize,
        /// Bytes of their rows.
        bytes: usize,
        /// Bytes that a row has.
        row_bytes: usize,
    },
}

impl std::fmt::Display for SlotError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SlotError::Outside(slot) => write!(f, "slot {slot} is outside the cache"),
            SlotError::Empty(slot) => write!(f, "slot {slot} has no row"),
            SlotError::Sizes { slots, bytes, row_bytes } => {
                write!(f, "{bytes} bytes are not {slots} rows of {row_bytes}")
            }
        }
    }
}

/// The version of a slot that nothing has filled.
pub const EMPTY: i64 = -1;

impl Slots {
    /// Memory is taken as slots are filled: the array starts as untouched zero pages.
    pub fn new(slots: usize, row_bytes: usize) -> Self {
        Slots { rows: vec![0; slots * row_bytes], versions: vec![EMPTY; slots], row_bytes }
    }

    fn index(&self, slot: i64) -> Result<usize, SlotError> {
        usize::try_from(slot).ok().filter(|s| *s < self.versions.len()).ok_or(SlotError::Outside(slot))
    }

    fn fits(&self, slots: usize, bytes: usize) -> Result<(), SlotError> {
        let row_bytes = self.row_bytes;
        if slots.checked_mul(row_bytes) == Some(bytes) {
            return Ok(());
        }
        Err(SlotError::Sizes { slots, bytes, row_bytes })
    }

    /// Row i of `rows` to slot `slots[i]`, of later duplicates the last. Nothing is written if a slot is outside.
    pub fn put(&mut self, slots: &[i64], rows: &[u8], version: i64) -> Result<(), SlotError> {
        self.fits(slots.len(), rows.len())?;
        for slot in slots {
            self.index(*slot)?;
        }
        for (i, slot) in slots.iter().enumerate() {
            let slot = self.index(*slot)?;
            let (from, to) = (i * self.row_bytes, slot * self.row_bytes);
            self.rows[to..to + self.row_bytes].copy_from_slice(&rows[from..from + self.row_bytes]);
            self.versions[slot] = version;
        }
        Ok(())
    }

    /// The rows of `slots` and their versions. Fails at a slot that nothing has filled.
    pub fn take(&self, slots: &[i64]) -> Result<(Vec<u8>, Vec<i64>), SlotError> {
        let mut rows = Vec::with_capacity(slots.len() * self.row_bytes);
        let mut versions = Vec::with_capacity(slots.len());
        for slot in slots {
            let i = self.index(*slot)?;
            if self.versions[i] == EMPTY {
                return Err(SlotError::Empty(*slot));
            }
            rows.extend_from_slice(&self.rows[i * self.row_bytes..(i + 1) * self.row_bytes]);
            versions.push(self.versions[i]);
        }
        Ok((rows, versions))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_of_a_slot_is_kept() {
        let mut s = Slots::new(4, 2);
        assert_eq!(s.put(&[1, 3, 1], &[1, 1, 2, 2, 3, 3], 7), Ok(()));
        assert_eq!(s.take(&[3, 1]), Ok((vec![2, 2, 3, 3], vec![7, 7])));
        assert_eq!(s.put(&[3], &[9, 9], 8), Ok(()));
        assert_eq!(s.take(&[1, 3, 3]), Ok((vec![3, 3, 9, 9, 9, 9], vec![7, 8, 8])));
        assert_eq!(s.take(&[]), Ok((vec![], vec![])));
    }

    #[test]
    fn wrong_slots_and_sizes_change_nothing() {
        let mut s = Slots::new(4, 2);
        for slot in [-1, 4, i64::MAX] {
            assert_eq!(s.put(&[0, slot], &[1, 1, 1, 1], 0), Err(SlotError::Outside(slot)));
        }
        assert_eq!(s.put(&[0], &[1], 0), Err(SlotError::Sizes { slots: 1, bytes: 1, row_bytes: 2 }));
        assert_eq!(s.take(&[0]), Err(SlotError::Empty(0)));
        assert_eq!(s.take(&[9]), Err(SlotError::Outside(9)));
    }
}
