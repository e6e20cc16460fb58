"""`tracekit guidance` on folders of every kind."""

import os

import numpy as np
import pytest

from tracekit.cli import main
from tracekit.guidance import GuidanceSchema, GuidanceWriter


def test_a_fanned_out_folder_is_one_dataset(tmp_path, store, capsys):
    """Ranks write their parts to different sub-folders: only together are they trajectories."""
    schema = store.schema()
    for part, sites in enumerate((schema.sites[:2], schema.sites[2:])):
        mine = GuidanceSchema(sites=sites)
        rows = store.rows(np.random.default_rng(part), mine, 4)
        while True:  # until the two writers' names differ in their first digits
            with GuidanceWriter(tmp_path / "run" / "step0", mine, fan_out=True) as w:
                t = w.begin("t", token_ids=np.arange(5), part=(part, 2))
                for name, (codes, scales, token_scale) in rows.items():
                    t.append(name, 0, codes, scales, token_scale)
                t.commit()
            if len(os.listdir(tmp_path / "run" / "step0")) > part:
                break
    for folder in ("run", "run/step0"):
        assert main(["guidance", "inspect", str(tmp_path / folder)]) == 0
        out = capsys.readouterr().out
        assert f"{tmp_path}/run/step0: " in out and ", 1 trajectories" in out and "t: tokens 0..4" in out
        for command in ("verify", "recover"):
            assert main(["guidance", command, str(tmp_path / folder)]) == 0
            assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]) == 1


def test_one_bad_folder_does_not_hide_the_others(tmp_path, store, capsys):
    for n in (0, 2):
        store.dataset(tmp_path / f"step{n}", [3])
    (tmp_path / "step1").mkdir()
    (tmp_path / "step1" / "a.tkg").write_bytes(b"nothing of ours" * 9)
    assert main(["guidance", "inspect", str(tmp_path)]) == 4
    out, err = capsys.readouterr()
    assert "step0: 1 segments" in out and "step2: 1 segments" in out
    assert "step1/a.tkg is damaged at byte 0" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["inspect", "verify", "recover", "stats"])
def test_what_is_no_segment_is_named_at_once(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "seg-a.tkg")  # to open it would wait for a writer
    assert main(["guidance", command, str(tmp_path)]) == 4
    assert "seg-a.tkg is no file: move it out of the folder" in capsys.readouterr().err
    for place, why in ((tmp_path / "nowhere", "check the path"), (tmp_path / "seg-a.tkg", "give the folder")):
        assert main(["guidance", command, str(place)]) == 4
        assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "recover"])
def test_a_url_is_not_taken_for_a_folder(capsys, command):
    assert main(["guidance", command, "s3://bucket/run"]) == 4
    assert "s3://bucket/run is a url" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
@pytest.mark.parametrize("command", ["inspect", "verify", "recover", "stats"])
def test_a_folder_that_may_not_be_read_is_an_error_of_ours(tmp_path, store, command):
    store.dataset(tmp_path / "run", [3])
    (tmp_path / "run").chmod(0o700)
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        os._exit(main(["guidance", command, str(tmp_path / "run")]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
