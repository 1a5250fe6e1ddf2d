"""Answers with labels or scores: ``/classify``, ``/score``, ``/rerank`` and ``/v1/moderations``.

A classification adapter has a score head: one logit for each of its labels. With an adapter of one label, ``/score``
and ``/rerank`` read both texts of a pair in one prompt, like a cross-encoder. With other models, they compare the
embeddings of the two texts.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import Request
from pydantic import AliasChoices, Field
from starlette.responses import JSONResponse, Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.pooled import MAX_TEXTS, PooledBody, PooledRun, Text, Texts, Vector, texts_of
from lorikeet.api.routes.embeddings import normalized, task_of
from lorikeet.chat.protocol import Body, Count
from lorikeet.core.request import Pooling
from lorikeet.http.errors import bad_request, not_supported
from lorikeet.http.model_routes import CLASSIFY, MODERATIONS, RERANK, SCORE
from lorikeet.http.routes import Routes
from lorikeet.http.streaming import CancelOnDisconnect
from lorikeet.serving.served_models import ResolvedModel
from lorikeet.serving.service import Service

ROUTES = Routes()

_LOGITS = Pooling(scores=True)
_FLAG_FROM = 0.5
_HARMLESS = frozenset(
    {"safe", "ok", "okay", "none", "neutral", "benign", "clean", "normal", "harmless", "acceptable", "negative", "no"}
)
"""Labels that flag nothing, besides labels that begin with ``not``, ``non`` or ``un``."""

Strings = str | Annotated[list[str], Field(max_length=MAX_TEXTS, fail_fast=True)]


class Part(Body):
    """A document, or a part of a moderation's input."""

    type: str | None = None
    text: str | None = None


Documents = Annotated[list[str | Part], Field(max_length=MAX_TEXTS, fail_fast=True)]


class ActivationBody(PooledBody):
    """Fields of the routes that return probabilities."""

    use_activation: bool | None = Field(None, validation_alias=AliasChoices("use_activation", "activation"))

    @property
    def activates(self) -> bool:
        """Whether the answer has probabilities instead of logits."""
        return self.use_activation is not False


class ClassificationRequest(ActivationBody):
    """Body of ``POST /classify``."""

    input: Texts


class ScoreRequest(ActivationBody):
    """Body of ``POST /score``, with vLLM's newer and older names of fields."""

    text_1: Strings = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Strings = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RerankRequest(ActivationBody):
    """Body of ``POST /rerank``, as in Jina's and Cohere's APIs."""

    query: str
    documents: Documents
    top_n: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None


class ModerationRequest(PooledBody):
    """Body of ``POST /v1/moderations``."""

    input: str | Documents


def labels_of(target: ResolvedModel) -> tuple[str, ...]:
    """Return the labels of a classification adapter.

    Raises:
        ApiError: 400, the model is not a classification adapter.
    """
    labels = 0 if target.adapter is None else target.adapter.labels
    if not labels:
        raise bad_request(
            f"The model `{target.name}` has no score head; name an adapter that was trained for classification "
            "(task_type SEQ_CLS).",
            "model",
        )
    return target.chat.task.labels or tuple(f"LABEL_{number}" for number in range(labels))


def probabilities(target: ResolvedModel, logits: Vector) -> Vector:
    """Return the probability of each label.

    Softmax gives the probabilities. A single label, and labels that a text can have together, get a sigmoid each.
    """
    if target.chat.task.is_multi_label or len(logits) == 1:
        each: Vector = 1 / (1 + np.exp(-logits.clip(-80, 80)))
        return each
    grown: Vector = np.exp(logits - logits.max())
    shares: Vector = grown / grown.sum()
    return shares


def _answer(run: PooledRun, make: Callable[[], Awaitable[dict[str, Any]]]) -> Response:
    async def made() -> Response:
        return JSONResponse(await make())

    return CancelOnDisconnect(made, run.close)


def _head(http: Request, prefix: str, target: ResolvedModel) -> dict[str, Any]:
    """Return the fields that open every answer."""
    return {
        "id": f"{prefix}-{http.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": target.name,
    }


@ROUTES.add(CLASSIFY)
async def classify(http: Request, body: ClassificationRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return the probability of each label and the likeliest label."""
    target = await service.resolve(body, sender)
    labels = labels_of(target)
    run = PooledRun(service, body, target, sender)

    async def make() -> dict[str, Any]:
        found = await run.vectors(texts_of(body.input), _LOGITS, "input")
        data = [
            {
                "index": index,
                "label": labels[int(logits.argmax())],
                "probs": (probabilities(target, logits) if body.activates else logits).tolist(),
                "num_classes": len(labels),
            }
            for index, logits in enumerate(found)
        ]
        return _head(http, "classify", target) | {"data": data, "usage": run.usage}

    return _answer(run, make)


async def _scores(
    run: PooledRun,
    service: Service,
    target: ResolvedModel,
    pairs: Sequence[tuple[str, str]],
    fields: tuple[str, str],
    *,
    activates: bool,
) -> list[float]:
    """Return the score of each pair of texts; ``fields`` name the fields of the first and of the second texts.

    Raises:
        ApiError: a text is not valid, or cannot be served.
    """
    if target.adapter is None or not target.adapter.labels:
        places: dict[str, str] = {}  # The query is the same text in all pairs and is read once.
        several = [len({pair[at] for pair in pairs}) > 1 for at in range(2)]
        for at, pair in enumerate(pairs):
            for text, field, has_several in zip(pair, fields, several, strict=True):
                places.setdefault(text, f"{field}.{at}" if has_several else field)
        pooling = task_of(service, target).pooling
        assert pooling is not None
        read = await run.vectors(list[Text](places), Pooling(pooling), fields[1], list(places.values()))
        vectors = dict(zip(places, normalized(read), strict=True))
        return [float(vectors[one] @ vectors[other]) for one, other in pairs]
    logits = await run.vectors(list[Text](pairs), _LOGITS, fields[1])
    return [float((probabilities(target, each) if activates else each)[0]) for each in logits]


def _check_one_label(target: ResolvedModel) -> None:
    """Check that a model gives one score.

    Raises:
        ApiError: 400, the model has several labels.
    """
    if target.adapter is not None and target.adapter.labels > 1:
        raise bad_request(
            f"The model `{target.name}` has {target.adapter.labels} labels; a score needs an adapter with one label, "
            "or one without a score head, whose embeddings are compared.",
            "model",
        )


@ROUTES.add(SCORE)
async def score(http: Request, body: ScoreRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return scores of pairs of texts: one text with each of the others, or two lists text by text."""
    target = await service.resolve(body, sender)
    _check_one_label(target)
    first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        raise bad_request(
            f"{len(first)} texts cannot be paired with {len(second)}: text_1 needs one text, or as many as text_2.",
            "text_2",
        )
    run = PooledRun(service, body, target, sender)

    async def make() -> dict[str, Any]:
        pairs = list(zip(first, second, strict=True))
        found = await _scores(run, service, target, pairs, ("text_1", "text_2"), activates=body.activates)
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(found)]
        return _head(http, "score", target) | {"data": data, "usage": run.usage}

    return _answer(run, make)


@ROUTES.add(RERANK)
async def rerank(http: Request, body: RerankRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return the documents that match a query best, best first."""
    target = await service.resolve(body, sender)
    _check_one_label(target)
    documents = _texts(body.documents, "documents")
    if not documents:
        raise bad_request("documents is empty; at least one is needed.", "documents")
    shows = body.return_documents
    if shows is None:  # Cohere's second version never returns the documents; Jina and vLLM do.
        shows = http.url.path != "/v2/rerank"
    run = PooledRun(service, body, target, sender)

    async def make() -> dict[str, Any]:
        pairs = [(body.query, document) for document in documents]
        found = await _scores(run, service, target, pairs, ("query", "documents"), activates=body.activates)
        best = sorted(range(len(found)), key=lambda index: (-found[index], index))[: body.top_n]
        results = [
            {"index": index, "relevance_score": found[index]}
            | ({"document": {"text": documents[index]}} if shows else {})
            for index in best
        ]
        head = _head(http, "rerank", target) | {"results": results, "usage": run.usage}
        return head | {"meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}}

    return _answer(run, make)


@ROUTES.add(MODERATIONS)
async def moderations(http: Request, body: ModerationRequest, service: ServiceDep, sender: SenderDep) -> Response:
    """Return the labels of a classification adapter that apply, and whether one of them flags the text."""
    target = await service.resolve(body, sender)
    labels = labels_of(target)
    texts = [body.input] if isinstance(body.input, str) else _texts(body.input, "input")
    run = PooledRun(service, body, target, sender)

    async def make() -> dict[str, Any]:
        found = await run.vectors(list[Text](texts), _LOGITS, "input")
        results = [_moderated(target, labels, logits) for logits in found]
        return {"id": f"modr-{http.state.request_id}", "model": target.name, "results": results}

    return _answer(run, make)


def _moderated(target: ResolvedModel, labels: Sequence[str], logits: Vector) -> dict[str, Any]:
    """Return OpenAI's result for one text.

    A label applies if its probability is at least one half. Only the likeliest of exclusive labels applies.
    """
    chances = probabilities(target, logits)
    several = target.chat.task.is_multi_label or len(labels) == 1
    applies = [bool(each >= _FLAG_FROM) for each in chances] if several else _only(int(logits.argmax()), len(labels))
    harmless = [_is_harmless(label) for label in labels]
    if not several and not any(harmless):
        harmless[0] = True  # Binary classifiers are trained with 1 for the class to detect.
    return {
        "flagged": any(each and not fine for each, fine in zip(applies, harmless, strict=True)),
        "categories": dict(zip(labels, applies, strict=True)),
        "category_scores": dict(zip(labels, chances.tolist(), strict=True)),
        "category_applied_input_types": {label: ["text"] for label in labels},
    }


def _only(index: int, length: int) -> list[bool]:
    return [number == index for number in range(length)]


def _is_harmless(label: str) -> bool:
    word = label.lower()
    return word in _HARMLESS or word.startswith(("not", "non", "un"))


def _texts(given: Sequence[str | Part], param: str) -> list[str]:
    """Return documents or parts as texts.

    Raises:
        ApiError: 501, an entry is not text.
    """
    texts = []
    for number, each in enumerate(given):
        if isinstance(each, Part) and each.text is None:
            raise not_supported(f"{param}.{number}: only text is supported.", param)
        texts.append(each.text or "" if isinstance(each, Part) else each)
    return texts
