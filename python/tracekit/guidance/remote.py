"""Manifests of a folder, and its publication in an object store."""

import os
import warnings
from typing import Any

from tracekit import _core


def commit_manifest(dir: Any) -> dict[str, Any]:
    """Writes the folder's next manifest, which lists its sealed segments, and returns the newest.

    One dict: number, parent, created_ns and segments (name, uuid, bytes, created_ns, trajectories, chunks). Nothing is
    written if nothing changed. Writers and other processes may do the same at once."""
    return _core.commit_manifest(os.fsdecode(dir))


def latest_manifest(dir: Any) -> dict[str, Any] | None:
    """The folder's newest manifest that passes its checks; None if there is none. Warns of newer ones that do not."""
    found, refused = _core.latest_manifest(os.fsdecode(dir))
    for why in refused:
        warnings.warn(f"an older manifest is read: {why}", stacklevel=2)
    return found


def publish(dir: Any, url: str, *, retries: int = 6) -> dict[str, int]:
    """Copies the folder's sealed segments to `s3://bucket/prefix`, `gs://bucket/prefix` or `file:///folder`.

    Credentials and endpoint come from the environment: `AWS_*` (also `AWS_ENDPOINT_URL`), or
    `GOOGLE_APPLICATION_CREDENTIALS`. A server that speaks Google's XML API is reached by a `GOOGLE_SERVICE_ACCOUNT_KEY`
    with `gcs_base_url` and `disable_oauth`, and `GOOGLE_ALLOW_HTTP=true` without TLS.

    Segments go first and the manifest last, so that a reader sees all of a publication or nothing of it. What is there
    already is not sent again: after an error call it again. Folders of several ranks may be published under one url.
    Returns number (of the newest manifest), segments (that it lists), uploaded, bytes (uploaded) and unsealed
    (segments still being written, which are left out)."""
    return _core.publish(os.fsdecode(dir), url, retries)
