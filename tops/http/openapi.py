"""The OpenAPI document of a broker's views."""

from typing import Any

_PATHS = {
    "/healthz": ("The process runs.", {"status": "string"}),
    "/readyz": ("200 when the broker is ready, 503 with what is missing.", {"ready": "boolean"}),
    "/v1/topology": ("Brokers, links and recent alarms.", {"broker": "string", "brokers": "array", "links": "array"}),
    "/v1/subscriptions": ("Subscriptions of the sites here, durable ones with position.", {"sites": "array"}),
    "/v1/transactions": ("Transactions that this broker coordinates, those in doubt first.", None),
    "/v1/transactions/{tx}": ("One transaction, also one that ended recently.", {"tx": "string"}),
    "/v1/ordering": ("The ordering domains, and what waits at the topic managers here.", {"domains": "array"}),
    "/v1/journal": ("The journal's size and bounds, and the logs in it.", {"first": "integer", "logs": "array"}),
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "TOPS broker", "version": "1"},
        "paths": {path: {"get": _operation(path, text, fields)} for path, (text, fields) in _PATHS.items()},
    }


def _operation(path: str, text: str, fields: dict[str, str] | None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
    if fields is not None:
        schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in fields.items()}}
    operation: dict[str, Any] = {
        "summary": text,
        "responses": {"200": {"description": text, "content": {"application/json": {"schema": schema}}}},
    }
    if "{tx}" in path:
        operation["parameters"] = [{"name": "tx", "in": "path", "required": True, "schema": {"type": "string"}}]
        operation["responses"]["404"] = {"description": "It is not known here."}
    return operation
