"""Engines whose own kernel rounds the experts' input: its codes are recorded, and nothing is rounded before it.

Blackwell's W4A4 runner `flashinfer_trtllm_routed` rounds in a Python function of its own, `quantize_hidden_states_fp4`,
before its kernel; both GEMMs and the second one's rounding are one kernel. Where the codes can't be seen the engine is
refused: what the plugin rounded would be rounded again. Not run on a Blackwell GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracekit.errors import EngineError
from tracekit.rollout.sglang.capture import Rounder
from tracekit.rollout.sglang.settings import Settings

TARGET = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm.quantize_hidden_states_fp4"
RUNNER = "flashinfer_trtllm_routed"
FOUR_BIT = ("modelopt_fp4", "modelopt_mixed", "nvfp4_online")
BLOCK = 16


def rounds_itself(quantization: str | None, runner: str | None) -> bool:
    """Whether this engine's experts round their own input where the plugin sees it. Raises EngineError for experts
    that do so elsewhere."""
    if quantization not in FOUR_BIT or runner == "marlin":  # Marlin's activations are BF16
        return False
    if quantization == "modelopt_fp4" and runner == RUNNER:
        return True
    why = {
        "flashinfer_trtllm": "its kernel routes too, and the routed experts it returns are all zero",
        RUNNER: f"{quantization} has a scale a token, records have one a site",
    }.get(runner, "it rounds the experts' input again, inside its kernel")
    raise EngineError(f"tracekit does not support {quantization} with moe_runner_backend {runner}: {why}; use {RUNNER}")


class NativeCodes:
    """Takes the runner's codes and scales of the layer that runs."""

    def __init__(self, settings: Settings, rounder: Rounder) -> None:
        self._scales, self._rounder = settings.static_scales, rounder
        self._layer: int | None = None
        self._seen = 0
        self._agreed: set[str] = set()

    def around(self, run, layer: object, dispatch_output: object):
        """Around `FusedMoE.run_moe_core`. Raises EngineError when the runner did not round exactly once in sight."""
        self._layer, self._seen = layer.layer_id, 0
        try:
            out = run(layer, dispatch_output)
        finally:
            self._layer = None
        if self._seen != 1:
            raise EngineError(
                f"tracekit: layer {layer.layer_id}'s experts rounded their input {self._seen} times where the plugin "
                f"sees it, not once; its records would be wrong\nstart the engine with --moe-runner-backend {RUNNER}"
            )
        return out

    def after(self, result: tuple[Tensor, Tensor], hidden_states: Tensor, input_scale_quant: Tensor) -> None:
        """After `quantize_hidden_states_fp4`: `result` is (codes u8 [T, K/2], scales e4m3 [T, K/16]), in token order.

        Raises EngineError when they have another layout, or the encode scale is not the settings'.
        """
        if self._layer is None:
            return
        site = f"layers.{self._layer}.moe_input"
        self._seen += 1
        packed, scales = result
        count, width = hidden_states.shape
        if packed.shape != (count, width // 2) or scales.shape != (count, width // BLOCK) or scales.itemsize != 1:
            raise EngineError(
                f"tracekit: {site}: codes {tuple(packed.shape)} and scales {tuple(scales.shape)} of another layout "
                f"than {count} rows of {width}"
            )
        if site not in self._agreed:  # in the first forward, which no CUDA graph captures: it waits for the device
            theirs = input_scale_quant.float().flatten().unique().tolist()
            if theirs != [self._scales.get(site)]:
                raise EngineError(
                    f"tracekit: {site}: the engine's encode scale is {theirs[:3]}, the settings say "
                    f"{self._scales.get(site)}\npublish input_scale = 1 / static_scales"
                )
            self._agreed.add(site)
        self._rounder.keep(site, hidden_states, packed.view(torch.uint8), scales.view(torch.uint8))
