"""Answers with vectors of texts: ``POST /v1/embeddings``."""

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import Request
from starlette.responses import Response

from lorikeet.adapters.task import AdapterTask
from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.pooled import PooledBody, PooledRun, Texts, Vector, texts_of
from lorikeet.chat.protocol import Count
from lorikeet.core.request import Pooling, PoolingKind
from lorikeet.http.errors import bad_request
from lorikeet.http.model_routes import EMBEDDINGS
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect
from lorikeet.http.threads import off_the_loop
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.serving.service import Service

ROUTES = Routes()


class EmbeddingRequest(PooledBody):
    """Body of ``POST /v1/embeddings``."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    pooling: Literal["mean", "weightedmean", "lasttoken", "last"] | None = None
    normalize: bool | None = None


def task_of(service: Service, target: ResolvedModel) -> AdapterTask:
    """Return how a model makes vectors: by the adapter's settings, else by the base model's."""
    own = target.chat.task
    base = service.base_task
    return (
        own
        if own.pooling is not None
        else msgspec.structs.replace(
            own, pooling=base.pooling or PoolingKind.LAST, normalizes=base.normalizes is not False
        )
    )


def normalized(vectors: Sequence[Vector]) -> list[Vector]:
    """Return vectors scaled to length 1; vectors of zeros stay unchanged."""
    return [(vector / max(float(np.linalg.norm(vector)), 1e-12)).astype("<f4") for vector in vectors]


@ROUTES.add(EMBEDDINGS)
async def embeddings(http: Request, body: EmbeddingRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return a vector for each text."""
    target = await service.resolve(body, sender)
    task = task_of(service, target)
    named = {"last": PoolingKind.LAST, **{kind.value: kind for kind in PoolingKind}}
    kind = task.pooling if body.pooling is None else named[body.pooling]
    assert kind is not None
    hidden_size = service.client.engine_info.geometry.hidden_size
    if body.dimensions is not None and body.dimensions > hidden_size:
        raise bad_request(
            f"dimensions is {body.dimensions}, but the vectors of this model have {hidden_size}.", "dimensions"
        )
    has_length_1 = task.normalizes if body.normalize is None else body.normalize
    run = PooledRun(service, body, target, sender)

    async def make() -> Response:
        vectors = await run.vectors(texts_of(body.input), Pooling(kind), "input")

        def write() -> bytes:
            cut = [vector[: body.dimensions] for vector in vectors]
            found = normalized(cut) if has_length_1 else cut
            as_text = body.encoding_format == "base64"
            answer = {
                "id": f"embd-{http.state.request_id}",
                "object": "list",
                "created": int(time.time()),
                "model": target.name,
                "data": [
                    {"object": "embedding", "index": index, "embedding": _written(vector, as_text=as_text)}
                    for index, vector in enumerate(found)
                ],
                "usage": run.usage,
            }
            return msgspec.json.encode(answer)

        content = await off_the_loop(write, sum(map(len, vectors)))
        return Response(content, media_type="application/json")

    return CancelOnDisconnect(make, run.close)


def _written(vector: Vector, *, as_text: bool) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
