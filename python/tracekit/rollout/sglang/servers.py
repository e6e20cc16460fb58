"""SGLang servers as the sampler: the engine's client over HTTP."""

from __future__ import annotations

import http.client
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tracekit.errors import EngineError
from tracekit.rollout.protocol import PublishedWeights
from tracekit.rollout.sglang.engine import SGLangEngine
from tracekit.rollout.sglang.settings import Settings

POLL_SECONDS = 0.5


class SGLangServers(SGLangEngine):
    """`protocol.Engine` over servers that `tracekit serve` started, on the same file system as the learner.

    A prompt's whole group goes to one server, whose prefix cache then holds the prompt. Weights are written to
    `weights_folder` once a version and read from there by every server.
    """

    def __init__(
        self,
        urls: list[str],
        settings: Settings,
        *,
        save_weights: Callable[[Path, PublishedWeights], None],
        weights_folder: Path,
        layers: int,
        top_k: int,
        eos_id: int,
        timeout: float,
    ) -> None:
        """Wait until all of `urls` answer. Raises EngineError naming the first that does not within `timeout` s."""
        self.urls = [url.rstrip("/") for url in urls]
        self.settings, self.eos_id, self.layers, self.top_k = settings, eos_id, layers, top_k
        self.version = -1
        self._save, self._folder, self._timeout = save_weights, weights_folder, timeout
        start = time.monotonic()
        for url in self.urls:
            self._wait_until_up(url, start + timeout)
        self.start_seconds = time.monotonic() - start

    def load(self, weights: PublishedWeights) -> None:
        """Every server loads `weights` from a folder and drops its prefix cache, whose rows are of older weights."""
        folder = self._folder / f"version_{weights.version:06d}"
        self._save(folder, weights)
        body = {"model_path": str(folder.resolve()), "flush_cache": True, "weight_version": str(weights.version)}
        with ThreadPoolExecutor(len(self.urls)) as pool:
            for answer in [pool.submit(self._post, url, "update_weights_from_disk", body) for url in self.urls]:
                answer.result()
        self.version = weights.version
        self._probe()
        for old in self._folder.glob("version_*"):
            if old != folder:
                shutil.rmtree(old)

    def shutdown(self) -> None:
        """Nothing: the servers are not ours to end."""

    def members(self) -> list[SGLangServers]:
        """A client a server, to check each by itself."""
        out = []
        for url in self.urls:
            one = object.__new__(type(self))
            one.__dict__.update(self.__dict__, urls=[url])
            out.append(one)
        return out

    def _ask(self, request: dict[str, Any], group_size: int) -> list[dict[str, Any]]:
        rows, count = len(request["input_ids"]), len(self.urls)
        share = -(-rows // group_size // count) * group_size
        parts = []
        for at, url in zip(range(0, rows, share), self.urls, strict=False):
            part = dict(request, input_ids=request["input_ids"][at : at + share])
            part["rid"] = request["rid"][at : at + share] if request["rid"] else None
            parts.append((url, part))
        with ThreadPoolExecutor(len(parts)) as pool:
            answers = [pool.submit(self._post, url, "generate", part) for url, part in parts]
            return [out for answer in answers for out in answer.result()]

    def _wait_until_up(self, url: str, until: float) -> None:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (OSError, http.client.HTTPException):
                pass  # not up yet, or still loading
            if time.monotonic() > until:
                raise EngineError(
                    f"no SGLang server answers at {url} after {self._timeout:g} s (rollout.server_timeout)\n"
                    f"start one: tracekit serve {self._folder.parent / 'engine_model'} --port {url.rsplit(':', 1)[-1]}"
                )
            time.sleep(POLL_SECONDS)

    def _post(self, url: str, what: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/{what}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = " ".join(error.read().decode(errors="replace").split())
            raise EngineError(f"{url}/{what}: the server refused ({error.code}): {text[:300]}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", error)
            raise EngineError(
                f"{url}/{what}: the server failed or did not answer within {self._timeout:g} s ({why})\n"
                "restart it and continue with --resume: a resumed run publishes its weights first"
            ) from error
