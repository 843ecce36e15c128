"""Holds answers of the API to its description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

Document = dict[str, Any]


def validator(document: Document, schema: Mapping[str, Any]) -> Draft202012Validator:
    """A check of values against a schema of the document."""
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator({**schema, "components": document["components"]})


def operation(document: Document, method: str, path: str) -> dict[str, Any]:
    """The description of a method at a path, whose parameters are filled in."""
    parts = path.partition("?")[0].split("/")
    found = [
        described
        for pattern, described in document["paths"].items()
        if len(pattern.split("/")) == len(parts)
        and all(
            part.startswith("{") or part == given
            for part, given in zip(pattern.split("/"), parts, strict=True)
        )
    ]
    assert len(found) == 1, f"{path} is described {len(found)} times"
    described: dict[str, Any] = found[0][method.lower()]
    return described


def check_answer(
    document: Document, method: str, path: str, status: int, kind: str, content: bytes
) -> None:
    """Fail if an answer is not as it is described."""
    responses = operation(document, method, path)["responses"]
    assert str(status) in responses, (
        f"{method} {path}: {status} is not described: {content[:300]!r}"
    )
    described = responses[str(status)].get("content")
    if described is None:
        assert content == b""
        return
    assert kind in described, f"{method} {path}: {kind} is not described"
    value = content.decode() if kind == "text/plain" else json.loads(content)
    errors = validator(document, described[kind]["schema"]).iter_errors(value)
    wrong = [f"{error.json_path}: {error.message[:200]}" for error in errors]
    assert not wrong, f"{method} {path}: {wrong[:5]}"


def check_document(document: Document) -> None:
    """Fail if a description is not sound: versions, ids, references, schemas, parameters."""
    assert document["openapi"] == "3.1.0"
    assert {"title", "version"} <= document["info"].keys()
    names = []
    for path, methods in document["paths"].items():
        assert path.startswith("/")
        in_path = {part.strip("{}") for part in path.split("/") if part.startswith("{")}
        for described in methods.values():
            names.append(described["operationId"])
            given = described.get("parameters", [])
            assert {each["name"] for each in given if each["in"] == "path"} == in_path
            for response in described["responses"].values():
                assert response["description"]
            for schema in _schemas(described):
                validator(document, schema)
            for need in described["security"]:
                assert need.keys() <= document["components"]["securitySchemes"].keys()
    assert len(set(names)) == len(names)
    for reference in _references(document):
        target: Any = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def _schemas(value: Any) -> list[Any]:
    if isinstance(value, dict):
        own = [value["schema"]] if isinstance(value.get("schema"), dict) else []
        return own + [each for inner in value.values() for each in _schemas(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in _schemas(inner)]
    return []


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [each for inner in value.values() for each in _references(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in _references(inner)]
    return []
