//! The fuzz targets on their seeds and on mutations of them, the same in every run. `fuzz/run.sh` searches further,
//! guided by coverage.
#[path = "../fuzz/src/chunk.rs"]
mod chunk;
#[path = "../fuzz/src/index.rs"]
mod index;
#[path = "../fuzz/src/limit.rs"]
mod limit;
#[path = "../fuzz/src/manifest.rs"]
mod manifest;
#[path = "../fuzz/src/open.rs"]
mod open;
#[path = "../fuzz/src/seeds.rs"]
mod seeds;

#[global_allocator]
static COUNTING: limit::Counting = limit::Counting;

/// Mutations a target; `TRACEKIT_FUZZ_RUNS` overrides it.
const RUNS: usize = 20_000;

type Target = fn(&[u8]);

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}

fn mutate(seed: &[u8], r: &mut Random) -> Vec<u8> {
    const EXTREMES: [u64; 8] = [0, 1, 0x7f, 0xff, 0xffff, u32::MAX as u64, 1 << 63, u64::MAX];
    let mut b = seed.to_vec();
    for _ in 0..1 + r.below(4) {
        if b.is_empty() {
            break;
        }
        let at = r.below(b.len());
        match r.below(6) {
            0 => b[at] ^= 1 << r.below(8),
            1 => b[at] = r.below(256) as u8,
            2 => {
                let size = [1, 2, 4, 8][r.below(4)];
                let value = EXTREMES[r.below(8)].to_le_bytes();
                let n = size.min(b.len() - at);
                b[at..at + n].copy_from_slice(&value[..n]);
            }
            3 => b.truncate(at),
            4 => {
                let n = r.below(64).min(b.len() - at);
                let piece = b[at..at + n].to_vec();
                let to = r.below(b.len());
                b.splice(to..to, piece);
            }
            _ => {
                let n = r.below(16).min(b.len() - at);
                b.drain(at..at + n);
            }
        }
    }
    b
}

#[test]
fn seeds_and_their_mutations_end_in_an_error_or_in_rows() {
    let runs = std::env::var("TRACEKIT_FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(RUNS);
    let targets: [(&str, Target); 4] =
        [("open", open::run), ("chunk", chunk::run), ("index", index::run), ("manifest", manifest::run)];
    for (name, run) in targets {
        let seeds = seeds::seeds(name);
        assert!(seeds.len() >= 4, "{name} has seeds");
        let mut r = Random(1);
        for seed in &seeds {
            limit::watch(seed, run);
        }
        for i in 0..runs {
            let input = mutate(&seeds[i % seeds.len()], &mut r);
            let panics = std::panic::catch_unwind(|| limit::watch(&input, run)).is_err();
            assert!(!panics, "target {name}, mutation {i}");
        }
    }
}
