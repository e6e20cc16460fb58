"""Packing: every sampled token is scored once, siblings share their prompt, uids address records."""

import numpy as np
import pytest
import torch

from tracekit.errors import DataError
from tracekit.learner.attention import packed_mask
from tracekit.learner.packing import microbatches, pack_rows
from tracekit.learner.records import runs_of
from tracekit.learner.tokens import TokenTable
from tracekit.rollout.protocol import Rollouts

PAD = 0


def make_rollouts(prompt_lens, response_lens, group_size, layers=2, seed=0):
    """Rollouts with random tokens: `response_lens` a row each, `prompt_lens` a group each."""
    rng = np.random.default_rng(seed)
    n = len(response_lens)
    group = np.repeat(np.arange(len(prompt_lens)), group_size)
    prompt_len = np.asarray(prompt_lens)[group]
    response_len = np.asarray(response_lens)
    total = int((prompt_len + response_len).max())
    tokens = np.zeros((n, total), np.int64)
    prompts = [rng.integers(4, 20, size=p) for p in prompt_lens]
    for row in range(n):
        tokens[row, : prompt_len[row]] = prompts[group[row]]
        end = prompt_len[row] + response_len[row]
        tokens[row, prompt_len[row] : end] = rng.integers(4, 20, size=response_len[row])
    return Rollouts(
        tokens=tokens,
        prompt_len=prompt_len,
        response_len=response_len,
        logp_mu=-rng.random((n, int(response_len.max()))).astype(np.float32),
        routes=rng.integers(0, 8, (n, total, layers, 2)).astype(np.uint8),
        finished=np.ones(n, bool),
        group=group,
        version=0,
        trajectory=[f"t{row}" for row in range(n)],
    )


def packed(rollouts, which=None, row_len=32, max_tokens=64):
    n = len(rollouts.group)
    return list(
        microbatches(
            rollouts,
            np.arange(n, dtype=np.float32),
            which=np.arange(n) if which is None else which,
            row_len=row_len,
            max_tokens=max_tokens,
            pad_id=PAD,
            replay=True,
            device=torch.device("cpu"),
        )
    )


def test_every_sampled_token_is_scored_once_with_its_own_numbers():
    r = make_rollouts([5, 3, 7], [4, 1, 6, 2, 3, 5], 2)
    seen = np.zeros_like(r.logp_mu, dtype=int)
    for b in packed(r):
        uid = b.token_uid[b.mask].numpy()
        row, column = uid >> 32, (uid & 0xFFFFFFFF) - (r.prompt_len[uid >> 32] - 1)
        seen[row, column] += 1
        np.testing.assert_array_equal(b.labels[b.mask].numpy(), r.tokens[row, r.prompt_len[row] + column])
        np.testing.assert_array_equal(b.logp_mu[b.mask].numpy(), r.logp_mu[row, column])
        np.testing.assert_array_equal(b.advantages[b.mask].numpy(), row)
        np.testing.assert_array_equal(b.rows[b.segment_ids[b.mask].numpy()], row)
    expected = np.arange(seen.shape[1])[None] < r.response_len[:, None]
    np.testing.assert_array_equal(seen, expected.astype(int))


def test_every_uid_names_its_token_position_and_routes():
    r = make_rollouts([5, 3], [4, 1, 6, 2], 2)
    for b in packed(r):
        real = b.token_uid >= 0
        uid = b.token_uid[real].numpy()
        row, at = uid >> 32, uid & 0xFFFFFFFF
        np.testing.assert_array_equal(b.tokens[real].numpy(), r.tokens[row, at])
        np.testing.assert_array_equal(b.positions[real].numpy(), at)
        routes = b.routes.view(2, *b.tokens.shape, 2)[:, real].numpy()
        np.testing.assert_array_equal(routes, r.routes[row, at].transpose(1, 0, 2))
        assert (b.tokens[~real] == PAD).all() and (b.group_ids[~real] == -1).all()


def test_siblings_share_their_prompt_and_do_not_see_each_other():
    r = make_rollouts([6], [3, 4, 2], 3)
    (b,) = packed(r)
    assert int((b.token_uid >= 0).sum()) == 5 + 3 + 4 + 2
    mask = packed_mask(b.group_ids, b.segment_ids)[0, 0]
    segment = b.segment_ids[0]
    for i in range(32):
        visible = mask[i].nonzero()[:, 0].tolist()
        if b.group_ids[0, i] < 0:
            assert visible == [i]
            continue
        assert all(j <= i and segment[j] in (-1, segment[i]) for j in visible)
        positions = b.positions[0, visible].tolist()
        assert positions == list(range(int(b.positions[0, i]) + 1))  # the whole past, once each


def test_groups_that_do_not_fit_a_row_repeat_their_prompt():
    r = make_rollouts([10], [8, 8, 8, 8], 4)
    batches = packed(r, row_len=32, max_tokens=32)
    assert sum(int((b.positions[b.token_uid >= 0] == 0).sum()) for b in batches) == 2
    assert sum(int(b.mask.sum()) for b in batches) == 32


def test_a_trajectory_longer_than_a_row_is_refused():
    r = make_rollouts([20], [20, 3], 2)
    with pytest.raises(DataError, match="row_len"):
        packed(r)


def test_pack_rows_keeps_every_item_and_the_limit():
    lengths = np.random.default_rng(1).integers(1, 33, 200)
    rows = pack_rows(lengths, 32)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert all(lengths[row].sum() <= 32 for row in rows)


def test_runs_of_splits_at_jumps_and_padding():
    uid = np.array([(2 << 32) + 0, (2 << 32) + 1, -1, (2 << 32) + 2, (3 << 32) + 0, (3 << 32) + 5])
    assert runs_of(uid) == [(0, 2, 0, 2), (3, 2, 2, 1), (4, 3, 0, 1), (5, 3, 5, 1)]
    assert runs_of(np.array([-1, -1])) == []


def test_numbers_of_single_tokens_go_with_their_tokens():
    """Advantages a token, and the sampler's top log-probs with their ids."""
    r = make_rollouts([5, 3, 7], [4, 1, 6, 2, 3, 5], 2)
    rng = np.random.default_rng(3)
    shape = (*r.logp_mu.shape, 3)
    r.topk_ids = rng.integers(0, 20, shape).astype(np.int32)
    r.topk_logp = -rng.random(shape).astype(np.float32)
    advantages = rng.random(r.logp_mu.shape).astype(np.float32)
    batches = microbatches(
        r,
        advantages,
        which=np.arange(6),
        row_len=32,
        max_tokens=64,
        pad_id=PAD,
        replay=False,
        device=torch.device("cpu"),
    )
    for b in batches:
        uid = b.token_uid[b.mask].numpy()
        row, column = uid >> 32, (uid & 0xFFFFFFFF) - (r.prompt_len[uid >> 32] - 1)
        np.testing.assert_array_equal(b.advantages[b.mask].numpy(), advantages[row, column])
        np.testing.assert_array_equal(b.topk_ids[b.mask].numpy(), r.topk_ids[row, column])
        np.testing.assert_array_equal(b.topk_logp[b.mask].numpy(), r.topk_logp[row, column])
        assert (b.topk_logp[~b.mask] == -torch.inf).all() and (b.topk_ids[~b.mask] == 0).all()


def test_the_token_table_gives_back_what_another_packing_put_in():
    r = make_rollouts([5, 3, 7], [4, 1, 6, 2, 3, 5], 2)
    table = TokenTable(r)
    for b in packed(r):
        table.put("x", b, b.logp_mu * 2)
    np.testing.assert_array_equal(table.values["x"], np.where(r.sampled, r.logp_mu * 2, 0))
    for b in packed(r, which=np.array([4, 5, 0, 1]), row_len=24):
        np.testing.assert_array_equal(table.get("x", b).numpy(), b.logp_mu.numpy() * 2)
    assert table.get("y", b) is None
