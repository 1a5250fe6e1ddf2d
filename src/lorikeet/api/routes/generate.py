"""Serves ``POST /generate`` of TGI, LoRAX and SGLang, which differ in the fields of their bodies."""

from typing import Any

from starlette.responses import Response

from lorikeet.api.dependencies import SenderDep, ServiceDep
from lorikeet.api.routes import sglang, tgi
from lorikeet.chat.protocol import validated
from lorikeet.http.errors import bad_request
from lorikeet.http.routes import Callers, Route, Routes

ROUTES = Routes(note="TGI's, LoRAX's and SGLang's: see [other servers' routes](#other-servers-routes)")


@ROUTES.add(Route("POST /generate", Callers.KEYS))
async def generate(body: dict[str, Any], service: ServiceDep, sender: SenderDep) -> Response:
    """Continue a prompt: ``inputs`` as in TGI and LoRAX, or ``text`` or ``input_ids`` as in SGLang."""
    if "inputs" in body:
        return await tgi.answer(service, validated(tgi.TgiRequest, body), sender, stream=False)
    if "text" in body or "input_ids" in body:
        return await sglang.answer(service, validated(sglang.SglangRequest, body), sender)
    raise bad_request("Give inputs, as in TGI and LoRAX, or text or input_ids, as in SGLang.", "inputs")
