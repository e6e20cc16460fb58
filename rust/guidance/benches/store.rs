//! Packing, encodings, writing, reading, opening, scanning. Ratios within one run are what to look at.
#![allow(missing_docs)]
use criterion::{criterion_group, criterion_main, BatchSize, BenchmarkId, Criterion, Throughput};
use std::hint::black_box;
use std::path::Path;
use tracekit_guidance::chunk::Payload;
use tracekit_guidance::coset::check_rows;
use tracekit_guidance::encode::Encoder;
use tracekit_guidance::pack::{pack_row, row_bytes, unpack_row};
use tracekit_guidance::writer::Begin;
use tracekit_guidance::*;

const WIDTH: usize = 2048;
const TOKENS: usize = 1024;

fn random(n: usize) -> Vec<u8> {
    let mut x = 1u64;
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 33) as u8
        })
        .collect()
}

/// Scale bytes with about 4.3 bits of entropy, as real ones have.
fn scales(n: usize) -> Vec<u8> {
    random(4 * n).chunks(4).map(|c| 90 + c.iter().map(|v| v % 10).sum::<u8>()).collect()
}

fn schema(sites: usize, encoding: Encoding, chunk_tokens: u32) -> Schema {
    let site = |i| Site {
        name: format!("layers.{i}.moe_input"),
        planes: 1,
        first_plane: 0,
        all_planes: 1,
        width: WIDTH as u32,
        profile: "nvfp4-exact".into(),
        block: 16,
        bits: 1,
        encoding,
        global_scale: GlobalScale::Static(0x3f80_0000),
        scale_format: ScaleFormat::E4m3,
    };
    Schema { sites: (0..sites).map(site).collect(), chunk_tokens, user: rmpv::Value::Map(vec![]) }
}

struct Data {
    codes: Vec<u8>,
    scales: Vec<u8>,
    ids: Vec<i64>,
}

fn data() -> Data {
    Data { codes: random(TOKENS * WIDTH / 8), scales: scales(TOKENS * WIDTH / 16), ids: (0..=TOKENS as i64).collect() }
}

fn rows(d: &Data, sites: usize) -> Vec<SiteRows<'_>> {
    vec![SiteRows { codes: Codes::Packed(&d.codes), scales: &d.scales, token_scale: &[] }; sites]
}

fn write(dir: &Path, schema: &Schema, d: &Data, trajectories: usize) {
    let mut w = Writer::new(dir, schema.clone(), Options::default()).unwrap();
    let rows = rows(d, schema.sites.len());
    for i in 0..trajectories {
        let id = format!("t{i}");
        let begin = Begin { id: &id, token_ids: &d.ids, policy: 0, prefix: None, part: (0, 1) };
        w.append_batch(&[begin], &[TOKENS as u32], &rows, Status::Complete).unwrap();
    }
    w.close().unwrap();
}

fn packing(c: &mut Criterion) {
    let mut g = c.benchmark_group("pack");
    let n = 64 << 20; // larger than caches: what memcpy does to a stream of activations
    g.sample_size(10);
    let src = random(n);
    let mut dst = vec![0; n];
    g.throughput(Throughput::Bytes(n as u64));
    g.bench_function("memcpy", |b| b.iter(|| dst.copy_from_slice(black_box(&src))));
    for bits in 1..=4u8 {
        let mut packed = vec![0; row_bytes(n, bits as usize)];
        g.bench_function(BenchmarkId::new("pack", bits), |b| b.iter(|| pack_row(bits, black_box(&src), &mut packed)));
        g.bench_function(BenchmarkId::new("unpack", bits), |b| {
            b.iter(|| unpack_row(bits, black_box(&packed), &mut dst))
        });
    }
    g.finish();
}

/// The scales of `compact`: low 3 bits and a check of each row, against a copy of as many bytes.
fn low3(c: &mut Criterion) {
    let mut g = c.benchmark_group("low3");
    let (n, row) = (64 << 20, WIDTH / 16);
    g.sample_size(10).throughput(Throughput::Bytes(n as u64));
    let src = random(n);
    let (mut dst, mut packed) = (vec![0; n], vec![0; row_bytes(n, 3)]);
    let mut checks = Vec::with_capacity(2 * n / row);
    g.bench_function("memcpy", |b| b.iter(|| dst.copy_from_slice(black_box(&src))));
    g.bench_function("code", |b| {
        b.iter(|| {
            // A chunk at a time, as the encoder does: its second pass finds the rows in a cache.
            checks.clear();
            for (src, dst) in src.chunks(256 * row).zip(packed.chunks_mut(row_bytes(256 * row, 3))) {
                pack_row(3, black_box(src), dst);
                check_rows(src.chunks_exact(row), &mut checks);
            }
        })
    });
    g.bench_function("decode", |b| b.iter(|| unpack_row(3, black_box(&packed), &mut dst)));
    g.finish();
}

const ENCODINGS: [Encoding; 4] = [Encoding::Lossless, Encoding::Compact, Encoding::Low2, Encoding::Rm15];

fn encoding(c: &mut Criterion) {
    let d = data();
    let mut g = c.benchmark_group("encode_chunk");
    g.throughput(Throughput::Bytes((256 * (WIDTH / 8 + WIDTH / 16)) as u64));
    for e in ENCODINGS {
        let schema = schema(1, e, 256);
        let rows = [rows(&d, 1)[0].slice(&schema.sites[0], 0, 256)];
        let (mut encoder, mut out) = (Encoder::default(), Vec::new());
        g.bench_function(e.name(), |b| {
            b.iter(|| {
                let mut payload = Payload::in_buffer(std::mem::take(&mut out));
                let flags = encoder.encode(&schema.sites, &rows, 256, &mut payload);
                out = payload.bytes;
                flags
            })
        });
    }
    g.finish();
}

fn scratch(name: &str) -> std::path::PathBuf {
    let root = if Path::new("/dev/shm").exists() { "/dev/shm".into() } else { std::env::temp_dir() };
    let dir = root.join(format!("tracekit-bench-{}-{name}", std::process::id()));
    std::fs::remove_dir_all(&dir).ok();
    dir
}

fn writing(c: &mut Criterion) {
    let d = data();
    let raw = (20 * TOKENS * (WIDTH / 8 + WIDTH / 16)) as u64;
    let mut g = c.benchmark_group("write_trajectory");
    g.throughput(Throughput::Bytes(raw)).sample_size(20);
    let dir = scratch("write");
    g.bench_function("write_and_crc", |b| {
        b.iter(|| {
            use std::io::Write;
            std::fs::create_dir_all(&dir).unwrap();
            let mut f = std::fs::File::create(dir.join("raw")).unwrap();
            for _ in 0..20 {
                for part in [&d.codes, &d.scales] {
                    black_box(crc32c(part));
                    f.write_all(part).unwrap();
                }
            }
            drop(f);
            std::fs::remove_dir_all(&dir).unwrap();
        })
    });
    for e in ENCODINGS {
        for chunk_tokens in [64, 256, 1024] {
            let schema = schema(20, e, chunk_tokens);
            g.bench_function(BenchmarkId::new(e.name(), chunk_tokens), |b| {
                b.iter(|| {
                    write(&dir, &schema, &d, 1);
                    std::fs::remove_dir_all(&dir).unwrap();
                })
            });
        }
    }
    g.finish();
}

fn reading(c: &mut Criterion) {
    let d = data();
    let mut g = c.benchmark_group("read");
    for e in ENCODINGS {
        let dir = scratch("read");
        let schema = schema(20, e, 256);
        write(&dir, &schema, &d, 4);
        let data = Dataset::open(&dir).unwrap();
        let names: Vec<String> = schema.sites.iter().map(|s| s.name.clone()).collect();
        let check = schema.sites[0].check_row();
        for (what, n_sites, a, b) in [("512 tokens of a site", 1, 256u32, 768u32), ("trajectory", 20, 0, TOKENS as u32)]
        {
            let n = (b - a) as usize;
            let mut out: Vec<(Vec<u8>, Vec<u8>, Vec<u8>)> =
                (0..n_sites).map(|_| (vec![0; n * WIDTH / 8], vec![0; n * WIDTH / 16], vec![0; n * check])).collect();
            let sites: Vec<&str> = names.iter().take(n_sites).map(String::as_str).collect();
            g.throughput(Throughput::Bytes((n * n_sites * (WIDTH / 8 + WIDTH / 16)) as u64));
            g.bench_function(BenchmarkId::new(what, e.name()), |bench| {
                bench.iter(|| {
                    let mut targets: Vec<Target> = out
                        .iter_mut()
                        .map(|(c, s, k)| Target {
                            heads: (0, 1),
                            codes: Some(c),
                            unpack: false,
                            scales: Some(s),
                            checks: Some(k),
                            token_scale: None,
                            row: 0,
                        })
                        .collect();
                    let request = Request { id: "t2", start: a, stop: b, token_ids: Some(&d.ids) };
                    data.read(&[request], &sites, &mut targets).unwrap();
                })
            });
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
    g.finish();
}

fn opening(c: &mut Criterion) {
    let mut g = c.benchmark_group("open");
    g.sample_size(10);
    for exponent in 3..=6 {
        let dir = scratch("open");
        let (n, per) = (10usize.pow(exponent), 10usize);
        let mut schema = schema(1, Encoding::Lossless, 1);
        schema.sites[0].width = 16;
        let (codes, scales) = (vec![0u8; per * 2], vec![100u8; per]);
        let ids: Vec<i64> = (0..=per as i64).collect();
        let mut w = Writer::new(&dir, schema, Options::default()).unwrap();
        for i in 0..n / per {
            let id = format!("trajectory-{i}");
            let begin = Begin { id: &id, token_ids: &ids, policy: 0, prefix: None, part: (0, 1) };
            let rows = SiteRows { codes: Codes::Packed(&codes), scales: &scales, token_scale: &[] };
            w.append_batch(&[begin], &[per as u32], &[rows], Status::Complete).unwrap();
        }
        w.close().unwrap();
        g.bench_function(BenchmarkId::new("chunks", n), |b| b.iter(|| Dataset::open(&dir).unwrap().len()));
        let sealed = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
        let open = sealed.with_extension("tkg.open");
        std::fs::rename(&sealed, &open).unwrap();
        g.bench_function(BenchmarkId::new("recovery scan", n), |b| {
            b.iter_batched(|| (), |()| Dataset::open(&dir).unwrap().len(), BatchSize::PerIteration)
        });
        std::fs::remove_dir_all(&dir).unwrap();
    }
    g.finish();
}

criterion_group!(benches, packing, low3, encoding, writing, reading, opening);
criterion_main!(benches);
