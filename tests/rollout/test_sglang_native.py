"""Experts that round their own input, with a runner that stands in for Blackwell's: it rounds in sight."""

from types import SimpleNamespace

import pytest
import torch

from tracekit import numerics
from tracekit.errors import EngineError
from tracekit.guidance import SiteSpec
from tracekit.kernels.low_bits import unpack_low_bits
from tracekit.rollout.sglang.capture import Rounder
from tracekit.rollout.sglang.native import NativeCodes, rounds_itself
from tracekit.rollout.sglang.settings import Settings

WIDTH, SCALE, TOKENS = 64, 32.0, 12
LAYERS = [SimpleNamespace(layer_id=i) for i in range(2)]


class Engine:
    """Two layers of experts; the second one's inputs are recorded."""

    def __init__(self, bits=1):
        spec = SiteSpec(name="layers.1.moe_input", width=WIDTH, bits=bits, global_scale=SCALE)
        scales = {f"layers.{i}.moe_input": SCALE for i in range(2)}
        settings = Settings(folder="x", experts="nvfp4-exact", sites=[spec], static_scales=scales)
        self.rounder = Rounder(settings, TOKENS, torch.device("cpu"))
        self.native = NativeCodes(settings, self.rounder)

    def round(self, x, scale=SCALE):
        """The runner's function, wrapped as the plugin wraps it."""
        q = numerics.quantize(x, "nvfp4-exact", global_scale=torch.tensor(SCALE))
        result = q.packed, q.scales.view(torch.float8_e4m3fn)
        self.native.after(result, x, torch.tensor([scale, scale]))
        return result

    def forward(self, xs, runner):
        return [
            self.native.around(runner, layer, SimpleNamespace(hidden_states=x))
            for layer, x in zip(LAYERS, xs, strict=True)
        ]


def inputs(count, seed=0):
    return torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_runners_own_codes_are_the_record(bits):
    engine = Engine(bits)
    for count in (TOKENS, 5):
        xs = inputs(count, seed=count)
        out = engine.forward(xs, lambda layer, given: engine.round(given.hidden_states)[0])
        assert torch.equal(engine.round(xs[1])[0], out[1])  # the runner's result passes through
        row = engine.rounder.take(count)
        want = numerics.quantize(xs[1], "nvfp4-exact", global_scale=torch.tensor(SCALE))
        codes = WIDTH * bits // 8
        assert torch.equal(unpack_low_bits(row[:, :codes], bits, WIDTH), numerics.low_bits(want.codes, bits))
        assert torch.equal(row[:, codes:], want.scales)


def test_a_runner_that_rounds_out_of_sight_is_an_error():
    engine = Engine()
    with pytest.raises(EngineError, match="layer 0's experts rounded their input 0 times"):
        engine.forward(inputs(4), lambda layer, given: given.hidden_states)
    twice = lambda layer, given: (engine.round(given.hidden_states), engine.round(given.hidden_states))  # noqa: E731
    with pytest.raises(EngineError, match="2 times"):
        engine.forward(inputs(4), twice)


def test_another_scale_or_layout_is_an_error():
    engine = Engine()
    with pytest.raises(EngineError, match=r"the engine's encode scale is \[16.0\], the settings say 32.0") as error:
        engine.forward(inputs(4), lambda layer, given: engine.round(given.hidden_states, scale=16.0))
    assert len(str(error.value).splitlines()) <= 3

    def swizzled(layer, given):
        packed, scales = engine.round(given.hidden_states)
        engine.native.after((packed, scales.new_zeros(128, 4)), given.hidden_states, torch.tensor([SCALE]))

    with pytest.raises(EngineError, match="of another layout than 4 rows of 64"):
        engine.forward(inputs(4), swizzled)


def test_calls_outside_the_experts_are_not_recorded():
    engine = Engine()
    engine.round(inputs(4)[0])
    assert not engine.rounder.take(4).any()


@pytest.mark.parametrize(
    ("quantization", "runner", "native"),
    [
        (None, "triton", False),
        ("fp8", "triton", False),
        ("modelopt_fp4", "marlin", False),
        ("modelopt_fp4", "flashinfer_trtllm_routed", True),
    ],
)
def test_which_engines_round_themselves(quantization, runner, native):
    assert rounds_itself(quantization, runner) is native


@pytest.mark.parametrize(
    ("quantization", "runner", "why"),
    [
        ("modelopt_fp4", "flashinfer_trtllm", "routed experts it returns are all zero"),
        ("modelopt_fp4", "flashinfer_cutlass", "inside its kernel"),
        ("modelopt_fp4", "auto", "inside its kernel"),
        ("nvfp4_online", "flashinfer_trtllm_routed", "a scale a token"),
    ],
)
def test_engines_that_round_out_of_sight_are_refused(quantization, runner, why):
    with pytest.raises(EngineError, match=why):
        rounds_itself(quantization, runner)
