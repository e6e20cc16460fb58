"""An SGLang engine's processes, from the process that started them: how they end, and who gets the signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from tracekit.errors import EngineError

SEAL_SECONDS = 30
"""How long a scheduler that ends may take to seal its last dataset."""

ENDED = "one of its processes ended; its log says why"


def ended_at_start(_signal: int, _frame: FrameType | None) -> None:
    """SIGQUIT, by which a child that fails tells its parent, before the engine is up. SGLang's own handler would kill
    this process."""
    raise EngineError(ENDED)


def take_signals(engine: Any, ended: Callable[[], None]) -> None:
    """Take SIGTERM back from `engine`, an `sglang.Engine`, and have `ended` called in its loop when a child fails.

    SGLang installs handlers with its first request: one waits for requests to finish, one kills this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    async def first_request() -> None:
        engine.tokenizer_manager.auto_create_handle_loop()

    engine.loop.run_until_complete(first_request())
    engine.loop.remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    engine.loop.add_signal_handler(signal.SIGQUIT, ended)


def end(engine: Any) -> None:
    """End the processes of `engine`. The schedulers first: SGLang would kill them before their last dataset is
    sealed."""
    import psutil

    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()  # it takes a child's end for a crash
    schedulers = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "".join(child.cmdline()[:1]).startswith("sglang::scheduler"):
                child.terminate()
                schedulers.append(child)
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(schedulers, timeout=SEAL_SECONDS)
    engine.shutdown()
