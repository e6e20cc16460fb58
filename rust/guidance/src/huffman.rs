//! Scales as zstd frames without sequences: Huffman-coded literals, and nothing that looks for repeats.
//!
//! Scales have no repeats worth finding. A general compressor spends most of its time looking for them, so the frame
//! (RFC 8878) is put together here, and any zstd decoder reads it.

/// Longest code of zstd's Huffman tables.
const MAX_BITS: usize = 11;
/// Most bytes of a block.
const BLOCK: usize = 128 << 10;
/// Symbols above this one have no place in a table of weights that is not compressed itself.
const MAX_SYMBOL: usize = 128;
/// Fewer bytes are left to zstd: the table would weigh too much.
const MIN: usize = 4096;

/// Codes of the symbols of one block.
struct Table {
    /// Of each symbol the code in the highest bits, and its length in the lowest.
    codes: [u64; 256],
    /// Length of each symbol's code; 0 for symbols that do not occur.
    lengths: [u8; 256],
    /// The longest.
    bits: usize,
    /// The last symbol that occurs.
    last: usize,
}

/// Bytes of which all or none are counted.
const STRIPE: usize = 64;
/// Of so many stripes one is counted.
const SPARSE: u32 = 8;

/// About how often each byte occurs; 0 only for bytes below the least or above the greatest of `src`.
fn counted(src: &[u8]) -> [u32; 256] {
    // Several tables: equal bytes in a row would wait for each other's count.
    let mut tables = [[0u32; 256]; 4];
    let (mut least, mut greatest) = (u8::MAX, 0);
    for (i, stripe) in src.chunks(STRIPE).enumerate() {
        least = stripe.iter().fold(least, |m, b| m.min(*b));
        greatest = stripe.iter().fold(greatest, |m, b| m.max(*b));
        // Not every fourth: rows have stripes too, and those in one place may be alike.
        if (i as u32).wrapping_mul(0x9e37_79b9) >> 16 & (SPARSE - 1) == 0 {
            let eights = stripe.chunks_exact(8);
            for eight in eights {
                let word = u64::from_le_bytes(eight.try_into().expect("8 bytes"));
                for i in 0..8 {
                    tables[i % 4][(word >> (8 * i)) as usize & 255] += 1;
                }
            }
        }
    }
    let seen = least as usize..=greatest as usize;
    let sum = |i: usize| tables.iter().map(|t| t[i]).sum::<u32>();
    std::array::from_fn(|i| if seen.contains(&i) { (SPARSE * sum(i)).max(1) } else { 0 })
}

/// Depths of the leaves of a Huffman tree over ascending `counts`, at least two.
fn depths(counts: &[u32]) -> Vec<usize> {
    let n = counts.len();
    // Nodes 0..n are leaves, the others are made in ascending order of weight.
    let mut weight: Vec<u64> = counts.iter().map(|c| *c as u64).collect();
    let mut parent = vec![0; 2 * n - 1];
    let (mut leaf, mut node) = (0, n);
    for made in n..2 * n - 1 {
        let mut sum = 0;
        for _ in 0..2 {
            let take_leaf = leaf < n && (node == made || weight[leaf] <= weight[node]);
            let least = if take_leaf { &mut leaf } else { &mut node };
            sum += weight[*least];
            parent[*least] = made;
            *least += 1;
        }
        weight.push(sum);
    }
    let mut depth = vec![0; 2 * n - 1];
    for i in (0..2 * n - 2).rev() {
        depth[i] = depth[parent[i]] + 1;
    }
    depth.truncate(n);
    depth
}

/// How many codes have each length, none above [`MAX_BITS`], so that they fill the code space.
fn limited(depths: &[usize]) -> [usize; MAX_BITS + 1] {
    let mut of = [0; MAX_BITS + 1];
    depths.iter().for_each(|d| of[(*d).min(MAX_BITS)] += 1);
    let space = |of: &[usize; MAX_BITS + 1]| (1..=MAX_BITS).map(|i| of[i] << (MAX_BITS - i)).sum::<usize>();
    let mut over = space(&of) - (1 << MAX_BITS);
    while over > 0 {
        // A longest code becomes the sibling of a shorter one, which grows by a bit.
        let shorter = (1..MAX_BITS).rev().find(|i| of[*i] > 0).expect("256 codes of 11 bits are not too many");
        of[MAX_BITS] -= 1;
        of[shorter] -= 1;
        of[shorter + 1] += 2;
        over -= 1;
    }
    of
}

impl Table {
    /// The table for these counts; `None` if zstd's uncompressed weights cannot express it.
    fn new(counts: &[u32; 256]) -> Option<Table> {
        let last = counts.iter().rposition(|c| *c > 0)?;
        let mut order: Vec<(u32, u8)> = (0..=last).filter(|s| counts[*s] > 0).map(|s| (counts[s], s as u8)).collect();
        if last > MAX_SYMBOL || order.len() < 2 {
            return None;
        }
        order.sort_unstable();
        let of = limited(&depths(&order.iter().map(|o| o.0).collect::<Vec<_>>()));
        let bits = of.iter().rposition(|n| *n > 0)?;
        let mut lengths = [0u8; 256];
        let mut rare = order.iter();
        for length in (1..=bits).rev() {
            rare.by_ref().take(of[length]).for_each(|(_, s)| lengths[*s as usize] = length as u8);
        }
        // Codes count up from 0, the longest first, among equals by symbol.
        let mut codes = [0u64; 256];
        let mut next = 0usize;
        for length in (1..=bits).rev() {
            for symbol in (0..=last).filter(|s| lengths[*s] as usize == length) {
                codes[symbol] = ((next >> (bits - length)) as u64) << (64 - length) | length as u64;
                next += 1 << (bits - length);
            }
        }
        Some(Table { codes, lengths, bits, last })
    }

    /// Appends the weights of all symbols but the last, whose own follows from theirs.
    fn describe(&self, out: &mut Vec<u8>) {
        out.push(127 + self.last as u8);
        let weight = |s: usize| match self.lengths[s] {
            0 => 0,
            length => self.bits as u8 + 1 - length,
        };
        for s in (0..self.last).step_by(2) {
            let second = if s + 1 < self.last { weight(s + 1) } else { 0 };
            out.push(weight(s) << 4 | second);
        }
    }
}

/// A bit stream in the making; the decoder starts at its end. The last `n` bits added are the highest of `bits`.
struct Stream {
    to: *mut u8,
    bits: u64,
    n: u64,
}

impl Stream {
    /// Adds a symbol.
    #[inline(always)]
    fn push(&mut self, code: u64) {
        // The code's length stands in its lowest bits and leaves them again before they could be written.
        self.bits = (self.bits >> (code & 63)) | code;
        self.n = self.n.wrapping_add(code);
    }

    /// Writes whole bytes: one to four symbols were added since the last time. What it writes behind them is no part
    /// of the stream, the next time writes over it.
    ///
    /// # Safety
    /// Eight bytes at `to` are the stream's.
    #[inline(always)]
    unsafe fn flush(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.to.cast::<u64>().write_unaligned(self.bits >> (self.n.wrapping_neg() & 63));
            self.to = self.to.add((self.n >> 3 & 7) as usize);
        }
        self.n &= 7;
    }
}

/// Encodes two parts of one length side by side, so that neither waits for the other, each into `room` bytes.
///
/// # Safety
/// `to` each have room for 11 bits a symbol and 16 bytes.
#[inline(always)]
unsafe fn pair(codes: &[u64; 256], parts: [&[u8]; 2], to: [*mut u8; 2]) -> [*mut u8; 2] {
    let [mut a, mut b] = to.map(|to| Stream { to, bits: 0, n: 0 });
    let common = parts[0].len().min(parts[1].len()) & !3;
    // What is over four times a number comes first: a stream is written from its end.
    for (stream, part) in [(&mut a, parts[0]), (&mut b, parts[1])] {
        for s in part[common..].iter().rev() {
            stream.push(codes[*s as usize]);
            // SAFETY: the caller's promise.
            unsafe { stream.flush() };
        }
    }
    let fours = parts.map(|p| p[..common].chunks_exact(4).rev());
    let [first, second] = fours;
    for (x, y) in first.zip(second) {
        for i in (0..4).rev() {
            a.push(codes[x[i] as usize]);
            b.push(codes[y[i] as usize]);
        }
        // SAFETY: as above.
        unsafe {
            a.flush();
            b.flush();
        }
    }
    [a, b].map(|mut s| {
        s.push(1 << 63 | 1); // the mark of the end
                             // SAFETY: as above.
        unsafe { s.flush() };
        s.to.wrapping_add((s.n > 0) as usize)
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi2")]
unsafe fn pair_bmi2(codes: &[u64; 256], parts: [&[u8]; 2], to: [*mut u8; 2]) -> [*mut u8; 2] {
    // SAFETY: the caller's promise. Shifts by a register are one operation here, three without.
    unsafe { pair(codes, parts, to) }
}

/// Writes four streams, each over a quarter of `src`, to where `space` bytes each begin in `room`; returns their lengths.
fn streams(codes: &[u64; 256], src: &[u8], room: &mut [u8], space: usize) -> [usize; 4] {
    let quarter = src.len().div_ceil(4);
    assert!(room.len() >= 4 * space && space >= quarter * MAX_BITS / 8 + 16);
    let parts: [&[u8]; 4] = std::array::from_fn(|i| &src[i * quarter..src.len().min((i + 1) * quarter)]);
    let start: [*mut u8; 4] = std::array::from_fn(|i| room[i * space..].as_mut_ptr());
    let mut lengths = [0; 4];
    for i in [0, 2] {
        let (parts, to) = ([parts[i], parts[i + 1]], [start[i], start[i + 1]]);
        // SAFETY: room for the longest codes was checked above.
        #[cfg(target_arch = "x86_64")]
        let ends = if std::arch::is_x86_feature_detected!("bmi2") {
            unsafe { pair_bmi2(codes, parts, to) }
        } else {
            unsafe { pair(codes, parts, to) }
        };
        #[cfg(not(target_arch = "x86_64"))]
        let ends = unsafe { pair(codes, parts, to) };
        for k in 0..2 {
            lengths[i + k] = ends[k] as usize - start[i + k] as usize;
        }
    }
    lengths
}

/// Makes frames; holds a buffer.
#[derive(Default)]
pub struct Huffman {
    room: Vec<u8>,
}

impl Huffman {
    /// Appends `src` as a zstd frame. `false`, and nothing appended, if this coder does not take it: few bytes, one
    /// symbol, or one above 128. Of what it takes it saves an eighth at least: no symbol needs more than 7 bits.
    pub fn frame(&mut self, src: &[u8], out: &mut Vec<u8>) -> bool {
        if src.len() < MIN || src.len() > u32::MAX as usize {
            return false;
        }
        let start = out.len();
        out.extend_from_slice(&0xfd2f_b528u32.to_le_bytes());
        // A single segment; the size takes two bytes, less 256, or four.
        if src.len() < 256 + (1 << 16) {
            out.push(1 << 6 | 1 << 5);
            out.extend_from_slice(&((src.len() - 256) as u16).to_le_bytes());
        } else {
            out.push(2 << 6 | 1 << 5);
            out.extend_from_slice(&(src.len() as u32).to_le_bytes());
        }
        let blocks = src.len().div_ceil(BLOCK);
        let size = src.len().div_ceil(blocks);
        for (i, block) in src.chunks(size).enumerate() {
            if !self.block(block, i + 1 == blocks, out) {
                out.truncate(start);
                return false;
            }
        }
        true
    }

    fn block(&mut self, src: &[u8], last: bool, out: &mut Vec<u8>) -> bool {
        let Some(table) = Table::new(&counted(src)) else { return false };
        let space = src.len().div_ceil(4) * MAX_BITS / 8 + 16;
        if self.room.len() < 4 * space {
            self.room.resize(4 * space, 0);
        }
        let lengths = streams(&table.codes, src, &mut self.room, space);
        let header = out.len();
        let wide = src.len() >= 1 << 14;
        let field = if wide { 18 } else { 14 };
        out.resize(header + 3 + if wide { 5 } else { 4 }, 0);
        let literals = out.len();
        table.describe(out);
        lengths[..3].iter().for_each(|n| out.extend_from_slice(&(*n as u16).to_le_bytes()));
        for (i, n) in lengths.iter().enumerate() {
            out.extend_from_slice(&self.room[i * space..i * space + n]);
        }
        let coded = (out.len() - literals) as u64;
        out.push(0); // no sequences
        let block = (out.len() - header - 3) as u32;
        out[header..header + 3].copy_from_slice(&(last as u32 | 2 << 1 | block << 3).to_le_bytes()[..3]);
        let sizes = 2 | (if wide { 3 } else { 2 }) << 2 | (src.len() as u64) << 4 | coded << (4 + field);
        out[header + 3..literals].copy_from_slice(&sizes.to_le_bytes()[..literals - header - 3]);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(n: usize, seed: u64, f: impl Fn(u64) -> u8) -> Vec<u8> {
        let mut x = seed;
        let step = |x: &mut u64| {
            *x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *x >> 33
        };
        (0..n).map(|_| f(step(&mut x))).collect()
    }

    /// Uniform bits to a bell around 60.
    fn bell(v: u64) -> u8 {
        (40 + (0..8).map(|i| (v >> (3 * i)) % 6).sum::<u64>()) as u8
    }

    fn round_trip(src: &[u8]) -> Option<usize> {
        let mut out = vec![1, 2, 3];
        if !Huffman::default().frame(src, &mut out) {
            assert_eq!(out, [1, 2, 3]);
            return None;
        }
        let back = zstd::bulk::decompress(&out[3..], src.len()).expect("a frame that zstd reads");
        assert!(back == src, "{} bytes", src.len());
        Some(out.len() - 3)
    }

    #[test]
    fn zstd_reads_frames_of_every_size() {
        for n in (4096..4200).chain([16_383, 16_384, 16_385, 65_791, 65_792, 1 << 17, (1 << 17) + 1, 400_003]) {
            let size = round_trip(&random(n, n as u64, bell)).expect("a bell gains");
            let zstd = zstd::bulk::compress(&random(n, n as u64, bell), 3).unwrap().len();
            assert!(size <= zstd + 64 * n.div_ceil(BLOCK), "{n}: {size}, zstd {zstd}");
        }
    }

    #[test]
    fn skewed_and_sparse_symbols_keep_to_the_longest_code() {
        for shape in 0..64u64 {
            let f = |v: u64| match shape % 4 {
                0 => (v.trailing_zeros() + 1) as u8,           // lengths would be up to 30
                1 => (v % (2 + shape)) as u8,                  // no gain near 128
                2 => [0, 128, 3, 127][(v % 997 % 4) as usize], // both ends
                _ => (v & v >> 7 & v >> 14 & (shape | 7)) as u8 & 127,
            };
            round_trip(&random(9000 + shape as usize, shape, f));
        }
        let mut fibonacci = Vec::new();
        let (mut a, mut b) = (1usize, 1usize);
        for s in 0..24u8 {
            fibonacci.extend(std::iter::repeat_n(s, a));
            (a, b) = (b, a + b);
        }
        assert!(round_trip(&fibonacci).is_some_and(|n| n < fibonacci.len() / 3));
    }

    #[test]
    fn what_it_does_not_take_is_left_alone() {
        assert_eq!(round_trip(&random(4095, 1, bell)), None, "few");
        assert_eq!(round_trip(&[7; 9000]), None, "one symbol");
        assert_eq!(round_trip(&random(9000, 1, |v| 120 + (v % 16) as u8)), None, "above 128");
    }
}
