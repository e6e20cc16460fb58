"""`tracekit serve`: an SGLang server with the plugin and the flags it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from tracekit.rollout.sglang.settings import Settings

USAGE = """\
usage: tracekit serve MODEL [--settings FILE] [--host HOST] [--port PORT] [SGLang's own flags ...]

Serve the Hugging Face folder MODEL by SGLang, which rounds to four bits and records guidance as FILE says (default:
MODEL/tracekit.json; `tracekit train` writes both to its run's engine_model/). Other flags go to SGLang as they are and
win over ours, for example --tp-size, --mem-fraction-static or --attention-backend.

options:
  --settings FILE   profiles, sites, scales and the folder of the records (docs/sglang.md)
  --host HOST       address to listen at (default 127.0.0.1)
  --port PORT       (default 30000)
  -h, --help        this text
"""


WARMUP = 64
"""Context that SGLang's first request, a short sentence, fits into even at a token a letter."""


def run(words: Sequence[str]) -> int:
    """Become the server: this process's program is replaced, so that signals and exit codes are SGLang's own."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    argv, environment = command(words)
    os.environ.update(environment)
    sys.stdout.flush()
    os.execv(argv[0], argv)


def command(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the server. Raises ConfigError or EngineError for what can't work."""
    model, rest = Path(words[0]), list(words[1:])
    if words[0].startswith("-") or not (model / "config.json").is_file():
        raise ConfigError(f"{words[0]}: not a Hugging Face model folder (config.json is missing); it comes first")
    if importlib.util.find_spec("sglang") is None:
        raise EngineError("tracekit serve needs SGLang in this environment; see docs/sglang.md")
    from tracekit.rollout.sglang import platform
    from tracekit.rollout.sglang.settings import FILE, Settings

    path = model / FILE
    if "--settings" in rest:
        at = rest.index("--settings")
        if at + 1 == len(rest):
            raise ConfigError("--settings: give a file")
        path = Path(rest[at + 1])
        del rest[at : at + 2]
    settings = Settings.load(path)
    flags, environment = server_flags(settings), settings.to_environment()
    if (model / "tokenizer.json").is_file():
        del flags["--skip-tokenizer-init"]  # text prompts can be served too
        if json.loads((model / "config.json").read_text()).get("max_position_embeddings", WARMUP) < WARMUP:
            flags["--skip-server-warmup"] = ""
    if "cpu" == flags.get("--device"):
        environment[platform.VARIABLE] = "1"
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    given = {word.partition("=")[0] for word in rest}
    ours = [word for name, value in flags.items() if name not in given for word in (name, value) if word]
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *ours, *rest], environment


def server_flags(settings: Settings) -> dict[str, str]:
    """SGLang's flags; an empty value is a switch."""
    import torch

    from tracekit.rollout.sglang.engine import engine_options

    flags = {}
    for name, value in engine_options(settings).items():
        if value is not False:
            flags["--" + name.replace("_", "-")] = "" if value is True else str(value)
    if torch.cuda.is_available():
        flags.pop("--device", None)
    return flags
