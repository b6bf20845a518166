"""Whether an MLflow server is there: asked before any work, in seconds, and without MLflow's library.

That library takes 170 MB of the process that imports it, in which a run is about to be measured.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from offstage.pipeline.errors import StorageError, words_of

WAIT_SECONDS = 5.0
"""How long a server is given to answer."""
_MOST = 1 << 20
_REFUSALS = (401, 403)
_NO_SUCH_EXPERIMENT = "RESOURCE_DOES_NOT_EXIST"
_INSTEAD = "start the server, correct the address, or give tracker=none"


def require_server(uri: str, experiment: str) -> None:
    """Ask the server at ``uri`` for ``experiment``, whether it has one or not.

    Raises ``StorageError``, with the key and the address, where nothing answers in time, where what answers is no
    MLflow server, and where it refuses the name and password, or the token, that the environment has for it.
    """
    asked = f"{uri}/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(experiment, safe='')}"
    request, headers = Request(asked), credentials(os.environ)
    for name, value in headers.items():
        request.add_unredirected_header(name, value)  # another host that this one sends to doesn't get it
    try:
        with urlopen(request, timeout=WAIT_SECONDS, context=_context(os.environ)) as answer:
            code, content = answer.status, answer.read(_MOST)
    except HTTPError as error:
        with error:
            code, content = error.code, error.read(_MOST)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        said = words_of(reason) if isinstance(reason, Exception) else str(reason)
        raise StorageError(
            f"tracker.uri: {uri!r} can't be reached within {WAIT_SECONDS:.0f} s ({said}); {_INSTEAD}"
        ) from error
    if code in _REFUSALS:
        if headers:
            raise StorageError(
                f"tracker.uri: {uri!r} refuses the credentials that the environment has for it ({code}); correct the "
                "variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        return  # MLflow's library may know others, from a file or by a plugin of its own
    answered = _read(content)
    if "experiment" not in answered and answered.get("error_code") != _NO_SUCH_EXPERIMENT:
        raise StorageError(f"tracker.uri: {uri!r} answers ({code}), and is no MLflow server; {_INSTEAD}")
    if answered.get("experiment", {}).get("lifecycle_stage") == "deleted":
        raise StorageError(f"tracker.experiment: {experiment!r} was deleted at {uri}; restore it, or give another name")


def credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the header by which MLflow's library would say who asks, of its variables in ``environment``; maybe none.

    A name and a password come before a token, as they do there.
    """
    name, password = (environment.get(f"MLFLOW_TRACKING_{part}") for part in ("USERNAME", "PASSWORD"))
    if name and password:
        return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}
    token = environment.get("MLFLOW_TRACKING_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _context(environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return how certificates are checked, as MLflow's library is told to."""
    context = ssl.create_default_context(cafile=environment.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    if environment.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _read(content: bytes) -> Mapping[str, Any]:
    """Return the object that ``content`` holds as JSON; one that says nothing where it holds none."""
    try:
        said: Any = json.loads(content)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
