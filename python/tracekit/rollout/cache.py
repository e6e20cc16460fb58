"""The FP4 KV cache, the buffers that keep the experts' inputs, and what is taken from both when requests finish."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tracekit import numerics
from tracekit.config.schema import ModelConfig


class SiteBuffer:
    """Codes u8 [R, T, planes, K], scales u8 [R, T, planes, K/block] and token scales f32 [R, T] of one site."""

    def __init__(self, rows: int, length: int, planes: int, width: int, block: int, token_scale: bool, device) -> None:
        blocks = -(-width // block)
        self.codes = torch.zeros(rows, length, planes, width, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows, length, planes, blocks, dtype=torch.uint8, device=device)
        self.token_scale = torch.zeros(rows, length, device=device) if token_scale else None

    def write(self, where, codes: torch.Tensor, scales: torch.Tensor, token_scale: torch.Tensor | None) -> None:
        """Store rows at `where` = (row [A], slot [A])."""
        self.codes[where] = codes.view(-1, *self.codes.shape[2:])
        self.scales[where] = scales.view(-1, *self.scales.shape[2:])
        if token_scale is not None:
            self.token_scale[where] = token_scale.reshape(-1)

    def take(self, where) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, scales and token scales at `where`."""
        return self.codes[where], self.scales[where], None if self.token_scale is None else self.token_scale[where]


class KVCache:
    """K and V of every layer, [R, T, Hkv, H]. Under an FP4 profile codes and scales are the record, and the values
    that attention reads are what they decode to."""

    def __init__(self, model: ModelConfig, profile: str | None, *, rows: int, length: int, device) -> None:
        self.model, self.profile = model, profile
        shape = (rows, length, model.n_kv_heads, model.head_dim)
        self._values = [[torch.zeros(shape, device=device) for _ in "kv"] for _ in range(model.n_layers)]
        self.sites: dict[str, SiteBuffer] = {}
        self._length = length

    def write(self, layer: int, where, key, value) -> None:
        """`key` and `value` are (values, codes, scales, token scale) of the tokens at `where` = (row, position)."""
        for j, (name, (values, codes, scales, token_scale)) in enumerate((("k", key), ("v", value))):
            self._values[layer][j][where] = values
            if codes is not None:
                site = f"layers.{layer}.{name}"
                if site not in self.sites:
                    self.sites[site] = self._buffer(token_scale is not None)
                self.sites[site].write(where, codes, scales, token_scale)

    def read(self, layer: int, rows: torch.Tensor | None = None, span: int | None = None):
        """Keys and values of `rows` (all) over the first `span` positions."""
        if rows is None:
            return tuple(self._values[layer])
        return tuple(v[:, :span][rows] for v in self._values[layer])

    def expand(self, group_size: int, length: int) -> KVCache:
        """A cache of `length` positions in which each row stands `group_size` times."""
        rows = self._values[0][0].shape[0] * group_size
        out = KVCache(self.model, self.profile, rows=rows, length=length, device=self._values[0][0].device)
        for mine, theirs in zip(self._values, out._values, strict=True):
            for j in range(2):
                theirs[j][:, : self._length] = mine[j].repeat_interleave(group_size, 0)
        for site, buffer in self.sites.items():
            grown = out.sites[site] = out._buffer(buffer.token_scale is not None)
            grown.codes[:, : self._length] = buffer.codes.repeat_interleave(group_size, 0)
            grown.scales[:, : self._length] = buffer.scales.repeat_interleave(group_size, 0)
            if buffer.token_scale is not None:
                grown.token_scale[:, : self._length] = buffer.token_scale.repeat_interleave(group_size, 0)
        return out

    def _buffer(self, token_scale: bool) -> SiteBuffer:
        rows, length, heads, width = self._values[0][0].shape
        block = numerics.profile_info(self.profile).block
        return SiteBuffer(rows, length, heads, width, block, token_scale, self._values[0][0].device)


@dataclass(kw_only=True, slots=True)
class Captured:
    """Rows of one site for the prompts, then for the responses, in token order: codes [T, planes, K], scales
    [T, planes, K/block], token scales [T] or None."""

    prompt: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    response: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(kw_only=True, slots=True)
class Capture:
    """Keeps what `sites` rounded during one `generate`; prompts once for their group."""

    sites: list[str]
    captured: dict[str, Captured] = field(default_factory=dict)

    def take(self, *, prompt_len, response_len, prompt_inputs, inputs, cache: KVCache, group_size: int) -> None:
        """Gather, at the end of a request, the rows of every input position: prompts in full, each response's
        tokens but the last, which no forward has seen."""
        first = torch.arange(len(prompt_len), device=prompt_len.device) * group_size
        prompt_rows, prompt_at = _ragged(torch.arange(len(prompt_len), device=prompt_len.device), prompt_len)
        own_rows, own_at = _ragged(torch.arange(len(response_len), device=prompt_len.device), response_len - 1)
        start = prompt_len.repeat_interleave(group_size)
        self.captured = {}
        for site in self.sites:
            _, layer, kind = site.split(".")
            if kind == "moe_input":
                prompt = prompt_inputs[int(layer)].take((prompt_rows, prompt_at))
                response = inputs[int(layer)].take((own_rows, own_at))
            else:
                buffer = cache.sites[site]
                prompt = buffer.take((first[prompt_rows], prompt_at))
                response = buffer.take((own_rows, start[own_rows] + own_at))
            self.captured[site] = Captured(prompt=prompt, response=response)


def _ragged(rows: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row of each element and its index within the row, for rows of `lengths` elements."""
    index = torch.repeat_interleave(rows, lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return index, torch.arange(len(index), device=rows.device) - starts.repeat_interleave(lengths)
