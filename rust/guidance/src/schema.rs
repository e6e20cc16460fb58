//! What a segment's rows look like: one [`Site`] for every place where values are quantised.
use crate::coset::syndrome_row;
use crate::error::{Error, Result};
use crate::layout::{FEATURE_COSET, FEATURE_SPLIT, MAX_CHUNK_TOKENS, MAX_PAYLOAD, MAX_SCHEMA};
use crate::pack::row_bytes;
use rmpv::Value;

const MAX_DEPTH: usize = 16;
const MAX_SITES: usize = 4096;

/// How rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Codes as they are, scales compressed with zstd level 1 where that helps.
    Lossless,
    /// Codes as they are, the low bits of scales (3 of E4M3, 1 of E8M0) and a row check.
    Compact,
    /// The same with 2 bits of E4M3.
    Low2,
    /// RM(1,5) syndromes of one-bit codes, scales as in `Low2`, and two row checks.
    Rm15,
}

/// What a scale byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleFormat {
    /// OCP E4M3 (NVFP4).
    E4m3,
    /// A power of two (MX).
    E8m0,
}

impl Encoding {
    /// The name in schemas and configurations.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::Lossless => "lossless",
            Encoding::Compact => "compact",
            Encoding::Low2 => "low2",
            Encoding::Rm15 => "rm15",
        }
    }

    /// The encoding of that name.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "lossless" => Ok(Encoding::Lossless),
            "compact" => Ok(Encoding::Compact),
            "low2" => Ok(Encoding::Low2),
            "rm15" => Ok(Encoding::Rm15),
            _ => Err(Error::Usage(format!("unknown encoding '{name}': use lossless, compact, low2 or rm15"))),
        }
    }
}

/// The encode scale that multiplies a row before its blocks are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GlobalScale {
    /// One value for every row: the bits of its fp32.
    Static(u32),
    /// One fp32 a token, stored with the rows.
    PerToken,
}

/// One place where values are quantised, e.g. `layers.3.moe_input`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Unique name.
    pub name: String,
    /// Rows of a token that this segment holds: 1, or the number of KV heads.
    pub planes: u32,
    /// The first of them among all that the token has; the others are in segments of other ranks.
    pub first_plane: u32,
    /// Rows that a token has in all segments together.
    pub all_planes: u32,
    /// Values of a row.
    pub width: u32,
    /// Numeric profile, e.g. `nvfp4-exact`.
    pub profile: String,
    /// Values that share a scale.
    pub block: u32,
    /// Low bits kept of each code, 0 to 4; 0 keeps scales only.
    pub bits: u8,
    /// How rows are stored.
    pub encoding: Encoding,
    /// The encode scale.
    pub global_scale: GlobalScale,
    /// What a scale byte is.
    pub scale_format: ScaleFormat,
}

impl Site {
    /// Packed bytes of a row's codes.
    pub fn code_row(&self) -> usize {
        row_bytes(self.width as usize, self.bits as usize)
    }

    /// Scales of a row.
    pub fn scale_row(&self) -> usize {
        self.width.div_ceil(self.block) as usize
    }

    /// Low bits kept of a scale: 8 keeps it whole.
    pub fn scale_bits(&self) -> u8 {
        match (self.encoding, self.scale_format) {
            (Encoding::Lossless, _) => 8,
            (_, ScaleFormat::E8m0) => 1,
            (Encoding::Compact, ScaleFormat::E4m3) => 3,
            (_, ScaleFormat::E4m3) => 2,
        }
    }

    /// Stored bytes of a row's codes.
    pub fn stored_code_row(&self) -> usize {
        match self.encoding {
            Encoding::Rm15 => syndrome_row(self.width as usize),
            _ => self.code_row(),
        }
    }

    /// Stored bytes of a row's scales before compression.
    pub fn stored_scale_row(&self) -> usize {
        row_bytes(self.scale_row(), self.scale_bits() as usize)
    }

    /// Stored bytes of a row's checks: two a check.
    pub fn check_row(&self) -> usize {
        match self.encoding {
            Encoding::Lossless => 0,
            Encoding::Compact | Encoding::Low2 => 2,
            Encoding::Rm15 => 4,
        }
    }

    /// Whether other segments hold some of its planes.
    pub fn split(&self) -> bool {
        self.all_planes != self.planes
    }

    /// Whether every token carries its own fp32 encode scale.
    pub fn per_token(&self) -> bool {
        self.global_scale == GlobalScale::PerToken
    }

    /// Stored bytes of a token before compression.
    pub fn token_bytes(&self) -> usize {
        let plane = self.stored_code_row() + self.check_row() + self.stored_scale_row();
        self.planes as usize * plane + if self.per_token() { 4 } else { 0 }
    }

    /// Bytes of a token with packed codes and whole scales, as it waits in the queue.
    pub fn packed_bytes(&self) -> usize {
        self.planes as usize * (self.code_row() + self.scale_row()) + if self.per_token() { 4 } else { 0 }
    }

    fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::Usage(format!("site '{}': {what}", self.name)));
        if self.name.is_empty() || self.name.len() > 255 {
            return bad("a name has 1 to 255 bytes".into());
        }
        if self.bits > 4 {
            return bad(format!("bits is {}, use 0 to 4", self.bits));
        }
        if self.planes == 0 || self.planes > 4096 {
            return bad(format!("planes is {}, use 1 to 4096", self.planes));
        }
        if self.all_planes > 4096 || self.first_plane.checked_add(self.planes).is_none_or(|end| end > self.all_planes) {
            return bad(format!(
                "planes {}.. ({} of them) do not lie in {}, at most 4096",
                self.first_plane, self.planes, self.all_planes
            ));
        }
        if self.split() && self.per_token() {
            return bad("planes of a token share its encode scale: ranks that split them need a static one".into());
        }
        if self.width == 0 || self.width > 1 << 20 || self.block == 0 {
            return bad(format!("width {} and block {} must be positive, width at most 2^20", self.width, self.block));
        }
        if self.encoding == Encoding::Rm15 && self.bits != 1 {
            return bad(format!("encoding rm15 is for bits = 1, not {}: use compact", self.bits));
        }
        if self.token_bytes() > 1 << 20 {
            return bad(format!("a token takes {} bytes, at most 1 MiB is supported", self.token_bytes()));
        }
        Ok(())
    }
}

/// The description of a segment's rows, and the user's own metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Schema {
    /// Sites in the order of the records.
    pub sites: Vec<Site>,
    /// Tokens of a full chunk.
    pub chunk_tokens: u32,
    /// The user's metadata, a msgpack map.
    pub user: Value,
}

fn field<'a>(map: &'a Value, key: &str) -> Result<&'a Value> {
    map.as_map()
        .and_then(|m| m.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v))
        .ok_or_else(|| Error::Usage(format!("schema: '{key}' is missing")))
}

fn text(map: &Value, key: &str) -> Result<String> {
    let v = field(map, key)?;
    v.as_str().map(str::to_owned).ok_or_else(|| Error::Usage(format!("schema: '{key}' is {v}, a string is needed")))
}

fn number(map: &Value, key: &str) -> Result<u32> {
    let v = field(map, key)?;
    v.as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| Error::Usage(format!("schema: '{key}' is {v}, a whole number below 2^32 is needed")))
}

/// Whether every string is UTF-8: msgpack does not say so, and Python refuses those that are not.
fn is_text(v: &Value) -> bool {
    match v {
        Value::String(s) => s.as_str().is_some(),
        Value::Array(list) => list.iter().all(is_text),
        Value::Map(map) => map.iter().all(|(k, v)| is_text(k) && is_text(v)),
        _ => true,
    }
}

impl Schema {
    /// Checks sizes and names.
    pub fn check(&self) -> Result<()> {
        if self.sites.is_empty() || self.sites.len() > MAX_SITES {
            return Err(Error::Usage(format!("schema: {} sites, use 1 to {MAX_SITES}", self.sites.len())));
        }
        if self.chunk_tokens == 0 || self.chunk_tokens > MAX_CHUNK_TOKENS {
            return Err(Error::Usage(format!(
                "schema: chunk_tokens is {}, use 1 to {MAX_CHUNK_TOKENS}",
                self.chunk_tokens
            )));
        }
        let mut names: Vec<&str> = Vec::with_capacity(self.sites.len());
        for site in &self.sites {
            site.check()?;
            let bytes = site.token_bytes() * self.chunk_tokens as usize;
            if bytes > MAX_PAYLOAD as usize / 2 {
                return Err(Error::Usage(format!(
                    "site '{}': a chunk of {} tokens takes {bytes} bytes, at most 32 MiB is supported: lower chunk_tokens",
                    site.name, self.chunk_tokens
                )));
            }
            names.push(&site.name);
        }
        names.sort_unstable();
        if let Some(w) = names.windows(2).find(|w| w[0] == w[1]) {
            return Err(Error::Usage(format!("schema: site '{}' appears twice", w[0])));
        }
        Ok(())
    }

    /// Incompatible feature bits that a reader of these rows must know.
    pub fn features(&self) -> u64 {
        let coset = self.sites.iter().any(|s| s.encoding != Encoding::Lossless);
        let split = self.sites.iter().any(Site::split);
        (if coset { FEATURE_COSET } else { 0 }) | (if split { FEATURE_SPLIT } else { 0 })
    }

    /// Index of a site.
    pub fn site(&self, name: &str) -> Option<usize> {
        self.sites.iter().position(|s| s.name == name)
    }

    /// The msgpack on disk.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check()?;
        let sites = self.sites.iter().map(|s| {
            let mut map = vec![
                ("name".into(), s.name.as_str().into()),
                ("planes".into(), s.planes.into()),
                ("width".into(), s.width.into()),
                ("profile".into(), s.profile.as_str().into()),
                ("block".into(), s.block.into()),
                ("bits".into(), s.bits.into()),
                ("encoding".into(), s.encoding.name().into()),
                (
                    "scale_format".into(),
                    match s.scale_format {
                        ScaleFormat::E4m3 => "e4m3".into(),
                        ScaleFormat::E8m0 => "e8m0".into(),
                    },
                ),
                (
                    "global_scale".into(),
                    match s.global_scale {
                        GlobalScale::Static(bits) => bits.into(),
                        GlobalScale::PerToken => Value::Nil,
                    },
                ),
            ];
            if s.split() {
                map.push(("first_plane".into(), s.first_plane.into()));
                map.push(("all_planes".into(), s.all_planes.into()));
            }
            Value::Map(map)
        });
        let root = Value::Map(vec![
            ("chunk_tokens".into(), self.chunk_tokens.into()),
            ("sites".into(), Value::Array(sites.collect())),
            ("user".into(), self.user.clone()),
        ]);
        let mut out = Vec::new();
        rmpv::encode::write_value(&mut out, &root).map_err(|e| Error::Usage(format!("schema: {e}")))?;
        if out.len() > MAX_SCHEMA as usize {
            return Err(Error::Usage(format!("schema: {} bytes, at most 1 MiB is supported", out.len())));
        }
        Ok(out)
    }

    /// Parses the msgpack of a schema.
    pub fn decode(mut bytes: &[u8]) -> Result<Self> {
        let root = rmpv::decode::read_value_with_max_depth(&mut bytes, MAX_DEPTH)
            .map_err(|e| Error::Usage(format!("schema: {e}")))?;
        if !is_text(&root) {
            return Err(Error::usage("schema: a string is not UTF-8"));
        }
        let list = field(&root, "sites")?;
        let list = list.as_array().ok_or_else(|| Error::usage("schema: 'sites' is not a list"))?;
        if list.len() > MAX_SITES {
            return Err(Error::Usage(format!("schema: {} sites, use 1 to {MAX_SITES}", list.len())));
        }
        let mut sites = Vec::with_capacity(list.len());
        for s in list {
            let bits = number(s, "bits")?;
            let planes = number(s, "planes")?;
            let or = |key: &str, default| if field(s, key).is_ok() { number(s, key) } else { Ok(default) };
            sites.push(Site {
                name: text(s, "name")?,
                planes,
                first_plane: or("first_plane", 0)?,
                all_planes: or("all_planes", planes)?,
                width: number(s, "width")?,
                profile: text(s, "profile")?,
                block: number(s, "block")?,
                bits: u8::try_from(bits).map_err(|_| Error::Usage(format!("schema: bits is {bits}")))?,
                encoding: Encoding::parse(&text(s, "encoding")?)?,
                scale_format: match text(s, "scale_format")?.as_str() {
                    "e4m3" => ScaleFormat::E4m3,
                    "e8m0" => ScaleFormat::E8m0,
                    other => return Err(Error::Usage(format!("schema: scale_format '{other}': use e4m3 or e8m0"))),
                },
                global_scale: match field(s, "global_scale")? {
                    Value::Nil => GlobalScale::PerToken,
                    _ => GlobalScale::Static(number(s, "global_scale")?),
                },
            });
        }
        let schema =
            Schema { sites, chunk_tokens: number(&root, "chunk_tokens")?, user: field(&root, "user")?.clone() };
        schema.check()?;
        Ok(schema)
    }

    /// Splits the sites into runs whose full chunk stays under `limit` bytes (at least one site each).
    pub fn groups(&self, limit: usize) -> Vec<(usize, usize)> {
        let mut groups = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (i, site) in self.sites.iter().enumerate() {
            let size = site.token_bytes() * self.chunk_tokens as usize;
            if i > start && bytes + size > limit {
                groups.push((start, i));
                (start, bytes) = (i, 0);
            }
            bytes += size;
        }
        groups.push((start, self.sites.len()));
        groups
    }
}
