"""The API's description, in OpenAPI 3.1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coordinator.operate.http.answers.api import ROOT, Endpoint
from coordinator.operate.http.answers.shapes import SHAPES, ref
from edge_sdk import __version__

_ERRORS = {
    400: "A value is wrong; the text says which.",
    401: "No valid token or session.",
    403: "The role does not allow it, or another page sent the request.",
    404: "There is no such run or device.",
    409: "The run refuses it now; the text says why.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    421: "The host's name is not one of this page.",
    429: "Too many attempts, or too many streams; Retry-After says when to try again.",
    500: "The coordinator made a mistake; its log says which.",
    501: "This run has no such command.",
    503: "The coordinator is busy; Retry-After says when to try again.",
}


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the description of these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tessera coordinator",
            "version": __version__,
            "description": (
                "Shows and steers the runs that a coordinator serves. Every key of an answer is "
                "always there; null means unknown. Times are Unix seconds."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": SHAPES,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "tessera-PORT",
                    "description": "Set by POST /api/v1/session; PORT is that of the page.",
                },
            },
        },
    }


def _operation(each: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": each.name,
        "summary": each.says,
        "security": [{"token": []}, {"session": []}] if each.role is not None else [],
        "responses": _responses(each),
    }
    if each.role is not None:
        found["description"] = f"Needs the role `{each.role.value}`."
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", each.path)
    ] + [
        {
            "name": parameter.name,
            "in": "query",
            "description": parameter.says,
            "schema": {"type": "integer", "minimum": 0} if parameter.whole else {"type": "string"},
        }
        for parameter in each.parameters
    ]
    if each.stream:
        parameters.append(
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "Id of the last event that was received.",
                "schema": {"type": "string"},
            }
        )
    if parameters:
        found["parameters"] = parameters
    if each.body is not None:
        content = {"application/json": {"schema": each.body}}
        found["requestBody"] = {"required": True, "content": content}
    return found


def _responses(each: Endpoint) -> dict[str, Any]:
    if each.result is None:
        responses: dict[str, Any] = {"204": {"description": "Done."}}
    else:
        kind = "application/json"
        if each.text or each.stream:
            kind = "text/plain" if each.text else "text/event-stream"
        responses = {"200": {"description": each.says, "content": {kind: {"schema": each.result}}}}
    errors = {400, 403, 421, 500}
    if each.role is not None:
        errors |= {401, 429}
    if "{" in each.path:
        errors |= {404, 503}
    elif each.role is not None:
        errors |= {503}
    if each.body is not None:
        errors |= {401, 413, 415, 429}
    if each.method == "DELETE":
        errors |= {413}
    if each.method == "POST" and each.role is not None:
        errors |= {409, 501}
    if not each.path.startswith(ROOT):
        errors |= {503}
    if each.path.endswith("/audit"):
        errors |= {501}
    for status in sorted(errors):
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": ref("Error")}},
        }
    return responses
