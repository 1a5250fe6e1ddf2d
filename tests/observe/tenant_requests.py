"""Requests of a tenant with an adapter."""

from lorikeet.core.adapter import AdapterRef
from lorikeet.core.ids import AdapterDigest, AdapterName, RequestId
from lorikeet.core.request import Request, SamplingParams


def sequence(name: str, adapter: str, tenant: str = "") -> Request:
    ref = AdapterRef(AdapterName(adapter), AdapterDigest(adapter), "", {}, 0)
    return Request(RequestId(name), [1, 2, 3], SamplingParams(4), 0.0, ref, tenant=tenant)
