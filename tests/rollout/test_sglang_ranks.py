"""What each tensor-parallel rank records: together every head once, and the experts' inputs once."""

import pytest

from tracekit.guidance import SiteSpec
from tracekit.rollout.sglang.settings import Settings


def settings(heads):
    kinds = [("moe_input", 1, 64), *([("k", heads, 32), ("v", heads, 32)] if heads else [])]
    sites = [SiteSpec(name=f"layers.0.{name}", planes=planes, width=width) for name, planes, width in kinds]
    return Settings(folder="x", sites=sites)


@pytest.mark.parametrize(("heads", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4), (2, 8), (1, 2), (0, 2)])
def test_every_head_is_recorded_once(heads, ranks):
    whole = settings(heads)
    shares = [whole.share(rank, ranks) for rank in range(ranks)]
    recording = [share for share in shares if share.sites]
    assert [share.part for share in recording] == list(range(len(recording)))
    assert {share.parts for share in recording} == {len(recording)}
    for site in whole.sites:
        parts = [s for share in recording for s in share.sites if s.name == site.name]
        assert [p for s in parts for p in range(s.first_plane, s.first_plane + s.planes)] == list(range(site.planes))
        assert all(s.joined == site for s in parts)
    assert {share.digest for share in shares} == {whole.digest}
    assert {share.schema.user["engine"] for share in shares} == {whole.digest}


def test_the_first_rank_has_the_experts_inputs():
    shares = [settings(2).share(rank, 2) for rank in range(2)]
    assert ["layers.0.moe_input" in [s.name for s in share.sites] for share in shares] == [True, False]
