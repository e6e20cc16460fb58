//! Quantise + pack on one core, in bytes of bf16 input a second, beside a copy of the same bytes.
//!
//! Time is the thread's own processor time, so that other load on the machine counts only through its caches.
//! `cargo bench -p tracekit-numerics`, or with a filter, e.g. `-- nvfp4-exact`.
use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{criterion_group, criterion_main, BenchmarkGroup, Criterion, Throughput};
use std::hint::black_box;
use std::time::Duration;
use tracekit_numerics::*;

/// Processor time of the calling thread.
struct CpuTime;

impl Measurement for CpuTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is to a timespec of ours.
        let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        assert_eq!(rc, 0, "this system has no clock of a thread's processor time");
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    fn end(&self, start: Duration) -> Duration {
        self.start() - start
    }

    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        *a + *b
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

const ROWS: usize = 8192;
const K: usize = 4096;

/// bf16 of heavy-tailed values: a linear congruence's sum of four, over another.
fn source() -> Vec<u16> {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut value = || (uniform() + uniform() + uniform() + uniform()) / (uniform().abs() + 0.05);
    (0..ROWS * K).map(|_| (value().to_bits() >> 16) as u16).collect()
}

fn run(group: &mut BenchmarkGroup<'_, CpuTime>, x: &[u16], profile: Profile, what: Run) {
    let mut packed = vec![0u8; ROWS * profile.packed_bytes(K)];
    let mut scales = vec![0u8; ROWS * profile.scales(K)];
    let mut wide = vec![0f32; ROWS * profile.scales(K)];
    let mut low = vec![0u8; ROWS * low_bytes(K, 4)];
    let mut values = vec![0u16; if what.values { x.len() } else { 0 }];
    let quantizer = Quantizer::with_isa(profile, what.isa);
    let per_row: Vec<f32> = (0..ROWS).map(|r| 60.0 + r as f32 / 100.0).collect();
    let global = if what.per_row { Global::Rows(&per_row) } else { Global::One(67.0) };
    group.bench_function(format!("{profile}{}", what.name), |b| {
        b.iter(|| {
            let scales = if profile.scale_format() == ScaleFormat::F32 {
                ScalesMut::F32(&mut wide)
            } else {
                ScalesMut::Bytes(&mut scales)
            };
            let outputs = Outputs {
                packed: Some(&mut packed),
                scales: Some(scales),
                low: (what.bits > 0).then(|| (what.bits, &mut low[..ROWS * low_bytes(K, what.bits)])),
                values: what.values.then_some(ValuesMut::Bf16(&mut values)),
            };
            quantizer.quantize(Values::Bf16(black_box(x)), K, global, outputs).unwrap();
        })
    });
}

#[derive(Clone, Copy)]
struct Run {
    name: &'static str,
    isa: Isa,
    bits: u32,
    per_row: bool,
    values: bool,
}

fn quantise(c: &mut Criterion<CpuTime>) {
    let x = source();
    let mut group = c.benchmark_group("bf16");
    group.throughput(Throughput::BytesDecimal(2 * x.len() as u64));
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut copy = vec![0u16; x.len()];
    group.bench_function("memcpy", |b| b.iter(|| copy.copy_from_slice(black_box(&x))));
    drop(copy);
    let plain = Run { name: "", isa: Isa::best(), bits: 0, per_row: false, values: false };
    for profile in Profile::ALL {
        run(&mut group, &x, profile, plain);
    }
    for profile in [Profile::Nvfp4Exact, Profile::Mxfp4Rceil, Profile::KvMx16] {
        run(&mut group, &x, profile, Run { name: " portable", isa: Isa::Portable, ..plain });
        run(&mut group, &x, profile, Run { name: " +1 bit", bits: 1, ..plain });
    }
    let exact = Profile::Nvfp4Exact;
    run(&mut group, &x, exact, Run { name: " +2 bits", bits: 2, ..plain });
    run(&mut group, &x, exact, Run { name: " +3 bits", bits: 3, ..plain });
    run(&mut group, &x, exact, Run { name: " per token", per_row: true, ..plain });
    run(&mut group, &x, exact, Run { name: " +values", values: true, ..plain });
    group.finish();
}

/// What a trainer does with a record: one bit and the rollout's scales.
fn guide(c: &mut Criterion<CpuTime>) {
    let x = source();
    let mut group = c.benchmark_group("bf16 guided");
    group.throughput(Throughput::BytesDecimal(2 * x.len() as u64));
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let quantizer = Quantizer::new(Profile::Nvfp4Exact);
    let mut packed = vec![0u8; x.len() / 2];
    let mut scales = vec![0u8; x.len() / 16];
    let mut low = vec![0u8; x.len() / 8];
    let outputs = Outputs {
        packed: Some(&mut packed),
        scales: Some(ScalesMut::Bytes(&mut scales)),
        low: Some((1, &mut low)),
        values: None,
    };
    quantizer.quantize(Values::Bf16(&x), K, Global::One(67.0), outputs).unwrap();
    let mut out = vec![0u16; x.len()];
    group.bench_function("nvfp4-exact 1 bit", |b| {
        let record = Record { guide: Guide::Packed(1, &low), scales: &scales, rounding: Rounding::Bracket };
        b.iter(|| {
            let out = ValuesMut::Bf16(&mut out);
            quantizer.guided_round(Values::Bf16(black_box(&x)), K, record, Global::One(67.0), out).unwrap();
        })
    });
    group.bench_function("nvfp4-exact dequantise", |b| {
        b.iter(|| {
            let (out, scales) = (ValuesMut::Bf16(&mut out), Scales::Bytes(&scales));
            quantizer.dequantize(black_box(&packed), scales, K, Global::One(67.0), out).unwrap();
        })
    });
    group.finish();
}

criterion_group!(
    name = benches;
    config = Criterion::default().with_measurement(CpuTime);
    targets = quantise, guide
);
criterion_main!(benches);
