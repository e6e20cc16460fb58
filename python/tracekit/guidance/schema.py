"""What a dataset's rows look like: one `SiteSpec` for every place where values are quantised."""

import struct
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack

from tracekit.errors import DataError

ENCODINGS = ("lossless", "compact", "low2", "rm15")


def float_bits(value: float) -> int:
    """Bits of `value` as fp32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits_float(bits: int) -> float:
    """The fp32 whose bits are `bits`."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@dataclass(kw_only=True, slots=True, frozen=True)
class SiteSpec:
    """One site: where values are quantised and how their rows are kept."""

    name: str
    """Unique, `layers.{i}.moe_input`, `layers.{i}.k`, `layers.{i}.v` …"""
    width: int
    """Values K of a row."""
    planes: int = 1
    """Rows of a token that this writer has: 1, or the number of its KV heads."""
    first_plane: int = 0
    """Number of the first of them, where tensor-parallel ranks each write some of a token's heads."""
    all_planes: int | None = None
    """Rows that the token has in all ranks' segments together; None: `planes`, nothing is split."""
    profile: str = "nvfp4-exact"
    """Numeric profile of `tracekit.numerics`."""
    block: int = 16
    """Values that share a scale byte."""
    bits: int = 1
    """Low bits kept of each code, 1 to 4; 0 keeps scales only."""
    global_scale: float | None = 1.0
    """The static encode scale (its fp32 bits are stored), or None for one fp32 a token."""
    encoding: str | None = None
    """How rows are stored; None takes the writer's `encoding`, or `lossless` where the row is too narrow to gain."""
    scale_format: str | None = None
    """`e4m3` or `e8m0`; None follows the profile (`mx…` and `kv-mx…` are e8m0)."""

    def __post_init__(self) -> None:
        if self.scale_format is None:
            form = "e8m0" if self.profile.startswith(("mx", "kv-mx")) else "e4m3"
            object.__setattr__(self, "scale_format", form)
        if self.all_planes is None:
            object.__setattr__(self, "all_planes", self.planes)

    @property
    def joined(self) -> "SiteSpec":
        """The site with the planes of all ranks, as a reader gives it back."""
        return self if self.planes == self.all_planes else replace(self, planes=self.all_planes, first_plane=0)

    @property
    def scale_bits(self) -> int:
        """Low bits kept of each scale."""
        if self.encoding in (None, "lossless"):
            return 8
        if self.scale_format == "e8m0":
            return 1
        return 3 if self.encoding == "compact" else 2

    @property
    def n_checks(self) -> int:
        """16-bit checks of a row."""
        return {"compact": 1, "low2": 1, "rm15": 2}.get(self.encoding or "lossless", 0)

    @property
    def stored_code_row(self) -> int:
        """Stored bytes of a row's codes."""
        return -(-(-(-self.width // 32) * 26) // 8) if self.encoding == "rm15" else self.code_row

    @property
    def stored_scale_row(self) -> int:
        """Stored bytes of a row's scales before compression."""
        return -(-self.scale_row * self.scale_bits // 8)

    def resolve(self, encoding: str) -> "SiteSpec":
        """This site with its encoding filled in. A row whose check and padding would cost what the encoding saves
        (about 0.85 of a row, which zstd reaches too) stays lossless, as do scale-only sites and the profiles whose
        scale rule has two branches."""
        if self.block < 1:
            raise ValueError(f"site '{self.name}': block is {self.block}, use 1 or more values a scale")
        if self.encoding is not None:
            return self
        lossless = replace(self, encoding="lossless")
        if encoding == "rm15" and self.bits != 1:
            encoding = "compact"
        coset = replace(self, encoding=encoding)
        size = coset.stored_code_row + coset.stored_scale_row + 2 * coset.n_checks
        gains = size < 0.85 * (self.code_row + self.scale_row)
        return coset if gains and self.bits and not self.two_branches else lossless

    @property
    def two_branches(self) -> bool:
        """Whether the profile's scale rule has two branches: a scale's low bits do not tell which was taken."""
        return "4over6" in self.profile

    def check_decodable(self) -> None:
        """Raise ValueError where an encoding is asked for that a reader could not decode again."""
        if self.encoding in (None, "lossless"):
            return
        from tracekit.numerics import PROFILES

        if self.two_branches:
            why = "its scale rule has two branches"
        elif self.profile not in PROFILES:
            why = f"tracekit does not know that profile ({', '.join(PROFILES)})"
        else:
            return
        raise ValueError(f"site '{self.name}': {self.encoding} cannot hold {self.profile}: {why}\nuse lossless")

    @property
    def code_row(self) -> int:
        """Bytes of a packed row of codes."""
        return -(-self.width * self.bits // 8)

    @property
    def scale_row(self) -> int:
        """Scales of a row."""
        return -(-self.width // self.block)


@dataclass(kw_only=True, slots=True, frozen=True)
class GuidanceSchema:
    """The sites of a writer, in the order of its records, and the user's own metadata."""

    sites: list[SiteSpec]
    user: dict[str, Any] = field(default_factory=dict)
    """Anything msgpack can hold: model hash, recipe, seed …; together with the sites at most 1 MiB."""

    def pack(self, encoding: str, chunk_tokens: int) -> bytes:
        """The msgpack that a segment begins with. Raises ValueError for what could not be read back."""
        resolved = [s.resolve(encoding) for s in self.sites]
        for s in resolved:
            s.check_decodable()
        sites = [
            {
                "name": s.name,
                "planes": s.planes,
                "width": s.width,
                "profile": s.profile,
                "block": s.block,
                "bits": s.bits,
                "encoding": s.encoding,
                "scale_format": s.scale_format,
                "global_scale": None if s.global_scale is None else float_bits(s.global_scale),
            }
            for s in resolved
        ]
        for packed, s in zip(sites, self.sites, strict=True):
            if s.planes != s.all_planes:
                packed |= {"first_plane": s.first_plane, "all_planes": s.all_planes}
        data = msgpack.packb({"chunk_tokens": chunk_tokens, "sites": sites, "user": self.user})
        if len(data) > 1 << 20:
            raise ValueError(f"the schema takes {len(data)} bytes, at most 1 MiB is supported: keep `user` small")
        return data

    @classmethod
    def unpack(cls, data: bytes) -> "GuidanceSchema":
        """The schema in a segment's msgpack."""
        try:
            root = msgpack.unpackb(data, strict_map_key=False)
            sites = [
                SiteSpec(**{**s, "global_scale": None if s["global_scale"] is None else bits_float(s["global_scale"])})
                for s in root["sites"]
            ]
            return cls(sites=sites, user=root["user"])
        except (ValueError, TypeError, KeyError, struct.error) as e:
            raise DataError(f"a segment's schema does not parse: {e}; use the tracekit that wrote it") from e
