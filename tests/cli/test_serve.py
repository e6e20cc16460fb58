"""`tracekit serve` before it becomes SGLang: what it refuses, and the command that it runs."""

import importlib.util
import json
import sys

import pytest

from tracekit.cli import main, serve
from tracekit.errors import ConfigError
from tracekit.rollout.sglang.settings import Settings

installed = importlib.util.find_spec("sglang") is not None


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    Settings(folder=str(tmp_path / "guidance"), experts="mxfp4", kv=None).save(tmp_path / "tracekit.json")
    return tmp_path


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_help_and_no_argument_show_the_usage(capsys):
    assert main(["serve", "--help"]) == 0
    assert "--settings FILE" in capsys.readouterr().out
    assert main(["serve"]) == 2
    assert "--settings FILE" in capsys.readouterr().err


@pytest.mark.skipif(installed, reason="SGLang is installed")
def test_without_sglang_it_says_so(model, capsys):
    assert main(["serve", str(model)]) == 3
    assert "needs SGLang" in capsys.readouterr().err


@pytest.mark.skipif(not installed, reason="SGLang is not installed")
def test_flags_given_win_over_ours_and_settings_travel(model):
    argv, environment = serve.command([str(model), "--port", "1", "--log-level=error"])
    assert argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert "--enable-return-routed-experts" in argv and "--log-level" not in argv
    assert json.loads(environment["TRACEKIT_SGLANG"])["experts"] == "mxfp4"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder": "x", "sites": [], "other": 1}', '{"sites": [{}]}'])
def test_a_file_that_holds_no_settings_is_named(tmp_path, text):
    path = tmp_path / "tracekit.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        Settings.load(path)


def test_settings_survive_their_file_and_the_digest_tells_them_apart(model):
    loaded = Settings.load(model / "tracekit.json")
    again = Settings(folder=loaded.folder, experts="mxfp4", kv=None)
    assert loaded == again and loaded.digest == again.digest
    assert loaded.digest != Settings(folder=loaded.folder, experts="mxfp4", kv="mxfp4").digest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rollout.servers", '["http://a:1"]'], "SGLang servers"),
        (["--rollout.engine", "sglang", "--rollout.servers", '["a:1"]'], "not an address"),
        (["--rollout.engine", "sglang", "--rollout.server-timeout", "0"], "greater than 0"),
    ],
)
def test_servers_of_the_configuration_are_checked(flags, message, capsys):
    assert main(["train", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not installed, reason="SGLang is not installed")
@pytest.mark.parametrize(("context", "warms_up"), [(32, False), (4096, True)])
def test_a_model_with_a_tokenizer_is_asked_in_text(model, context, warms_up):
    assert "--skip-tokenizer-init" in serve.command([str(model)])[0]
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    (model / "tokenizer.json").write_text("{}")
    flags = serve.command([str(model)])[0]
    assert "--skip-tokenizer-init" not in flags
    assert ("--skip-server-warmup" in flags) is not warms_up
