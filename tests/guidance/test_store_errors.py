"""Every refusal is one line that names what, where and what to do."""

import numpy as np
import pytest

from tracekit.errors import DataError
from tracekit.guidance import GuidanceWriter, open_dataset


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) > 30
    return text


def test_missing_trajectory_site_and_tokens(tmp_path, store):
    data = store.dataset(tmp_path, [10, 4])
    reader = open_dataset(tmp_path)
    with pytest.raises(DataError) as e:
        reader["nobody"].read()
    assert "trajectory 'nobody' is not in" in one_line(e)
    with pytest.raises(DataError) as e:
        reader["t0"].read(sites=["layers.9.k"])
    assert "site 'layers.9.k' is not recorded" in one_line(e)
    with pytest.raises(DataError) as e:
        reader["t0"].read(slice(0, 11))
    assert "0..10, 0..11 was asked for: the last sampled token has none" in one_line(e)
    with pytest.raises(DataError) as e:
        reader["t0"].read(slice(5, 99))
    assert "ask for tokens that it has" in one_line(e)
    with pytest.raises(DataError) as e:
        reader.read_batch(["t0"], token_ids=[data.tokens[1]])
    assert "token_ids has 5 ids, the record covers tokens 0..10" in one_line(e)
    with pytest.raises(DataError) as e:
        reader.read_batch(["t1"], token_ids=[data.tokens[0]])
    assert "trajectory 't1': tokens 0..4 are not those its record was made for" in one_line(e)


def test_folder_without_segments(tmp_path):
    with pytest.raises(DataError) as e:
        open_dataset(tmp_path)
    assert "holds no guidance segments" in one_line(e)
    with pytest.raises(DataError, match="cannot list"):
        open_dataset(tmp_path / "nowhere")


def test_writer_refuses_what_does_not_fit(tmp_path, store):
    schema = store.schema()
    rows = store.rows(np.random.default_rng(0), schema, 4)
    name = schema.sites[0].name
    codes, scales, _ = rows[name]
    with GuidanceWriter(tmp_path, schema) as w:
        t = w.begin("a", token_ids=np.arange(5))
        with pytest.raises(ValueError, match="codes has 396 bytes, 4 tokens of 1 x 100 values need 400"):
            t.append(name, 0, codes[..., :-1], scales)
        with pytest.raises(ValueError, match="rows start at token 1, token 0 is next"):
            t.append(name, 1, codes, scales)
        with pytest.raises(DataError, match="site 'layers.7.x' is not in the writer's schema"):
            t.append("layers.7.x", 0, codes, scales)
        t.append(name, 0, codes, scales)
        with pytest.raises(ValueError, match="rows up to token 8, but token_ids has 5"):
            t.append(name, 4, codes, scales)
        with pytest.raises(ValueError, match="append both before commit"):
            t.commit()
        with pytest.raises(ValueError, match="'a' was written before"):
            w.begin("a", token_ids=np.arange(5))
        with pytest.raises(ValueError, match="1 to 255"):
            w.begin("é" * 128, token_ids=np.arange(5))
        with pytest.raises(ValueError, match="its prefix is None"):
            w.append_batch(["b"], [np.arange(5)], 2, [3], rows)
        t.commit("aborted")
        with pytest.raises(ValueError, match="committed or dropped already"):
            t.commit()
    assert open_dataset(tmp_path)["a"].n_tokens == 0


def test_schema_is_checked(tmp_path, store):
    from dataclasses import replace

    schema = store.schema()
    for bad, text in (({"bits": 5}, "bits is 5"), ({"width": 0}, "must be positive"), ({"planes": 0}, "planes is 0")):
        sites = [replace(schema.sites[0], **bad)]
        with pytest.raises(ValueError, match=text):
            GuidanceWriter(tmp_path, replace(schema, sites=sites))
    with pytest.raises(ValueError, match="appears twice"):
        GuidanceWriter(tmp_path, replace(schema, sites=schema.sites[:1] * 2))
    with pytest.raises(ValueError, match="encoding 'zip'"):
        GuidanceWriter(tmp_path, schema, encoding="zip")


def test_uncommitted_trajectories_are_dropped_and_counted(tmp_path, store):
    schema = store.schema()
    rows = store.rows(np.random.default_rng(0), schema, 4)
    with GuidanceWriter(tmp_path, schema, chunk_tokens=2) as w:
        for i in range(3):
            t = w.begin(f"x{i}", token_ids=np.arange(5))
            for s in schema.sites:
                t.append(s.name, 0, *rows[s.name])
            if i == 1:
                t.commit()
    assert w.stats()["dropped"] == 2
    assert open_dataset(tmp_path).ids() == ["x1"]
