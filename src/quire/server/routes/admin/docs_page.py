"""GET /openapi.json and /docs: the API's OpenAPI document, as JSON and as one HTML page.

The page is self-contained, without scripts or pictures, and its Content-Security-Policy lets a
browser load nothing. It is made only from the document. Served by `app`.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from starlette.requests import Request as HTTPRequest
from starlette.responses import HTMLResponse, Response

from quire.errors import ConfigurationError, QuireError, SchedulerStalledError
from quire.server.http.body import NOT_SUPPORTED
from quire.server.http.streaming import json_response
from quire.server.routes.endpoint import Endpoints
from quire.server.routes.openapi import api_document

Schema = Mapping[str, Any]

PATH = "/docs"

router = Endpoints(is_suggested=False)

STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5b6570; --line: #dde2e7;
  --back: #fff; --box: #f6f7f9; --accent: #0b5cad; --post: #10703c }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7ea; --soft: #9aa5b1; --line: #333b44;
  --back: #14171a; --box: #1c2126; --accent: #78b3f2; --post: #6cc592 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1.25rem 4rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.6rem }
h2 { margin: 2.75rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line);
  font-size: 1.15rem; overflow-wrap: anywhere }
h3 { margin: 1.25rem 0 .4rem; font-size: .95rem }
p { margin: .4rem 0; max-width: 46rem }
a { color: var(--accent) }
code, .path { font: .88em ui-monospace, monospace }
h2 .path { font-size: 1.02em; font-weight: 600 }
.method { margin-right: .6em; color: var(--accent); font: 700 .78em ui-monospace, monospace }
.post { color: var(--post) }
.soft { color: var(--soft) }
nav { margin: 1.25rem 0 0; padding: .75rem 1rem; background: var(--box); border-radius: .5rem }
nav ul { margin: 0; padding: 0; list-style: none; columns: 19rem }
nav li { padding: .12rem 0; break-inside: avoid }
nav a { text-decoration: none }
table { width: 100%; border-collapse: collapse; font-size: .92rem }
th { color: var(--soft); font-weight: 500; font-size: .8rem }
th, td { padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
td:first-child { min-width: 13.5rem; overflow-wrap: anywhere }
td:nth-child(2), td:nth-child(3) { min-width: 7rem }
summary { margin-top: .9rem; color: var(--accent); cursor: pointer; font-size: .92rem }
@media (max-width: 44rem) { thead { display: none } table, tbody, tr, td { display: block }
  tr { padding: .5rem 0; border-bottom: 1px solid var(--line) }
  td { padding: .05rem 0; border: 0 } td:empty { display: none }
  td[data-name]::before { content: attr(data-name) ": "; color: var(--soft) } }
"""

POLICY = (
    "default-src 'none'; style-src 'sha256-"
    f"{b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy, which allows the style above and nothing else."""


class Row(NamedTuple):
    """One line of a table. All cells but the first may be empty."""

    name: str
    kind: str = ""
    bounds: str = ""
    note: str = ""


@router.route("/openapi.json", "GET", "HEAD", include_in_schema=False)
async def openapi(http: HTTPRequest) -> Response:
    """The OpenAPI document, made at the first request."""
    return json_response(_document(http))


@router.route(PATH, "GET", "HEAD", include_in_schema=False)
async def docs_page(http: HTTPRequest) -> HTMLResponse:
    """The HTML page of the OpenAPI document, made at the first request."""
    state = http.app.state
    if not hasattr(state, "docs_page"):
        state.docs_page = api_page(_document(http))
    return HTMLResponse(state.docs_page, headers={"Content-Security-Policy": POLICY})


def _document(http: HTTPRequest) -> Mapping[str, Any]:
    app = http.app
    if not hasattr(app.state, "api_document"):
        app.state.api_document = api_document(app.routes)
    document: Mapping[str, Any] = app.state.api_document
    return document


def api_page(document: Mapping[str, Any]) -> str:
    """The HTML of an OpenAPI document."""
    parts = document.get("components", {}).get("schemas", {})
    calls = [
        (path, method, call)
        for path, methods in document["paths"].items()
        for method, call in methods.items()
    ]
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    links = (
        f'<li><a href="#{_anchor(method, path)}">{_name(method, path)}</a></li>'
        for path, method, _ in calls
    )
    sections = (_section(path, method, call, parts) for path, method, call in calls)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: API</title>\n<style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{title}</h1>\n{_INTRODUCTION}"
        f'<nav aria-label="routes"><ul>{"".join(links)}'
        '<li><a href="#errors">Errors</a></li></ul></nav>\n<main>\n'
        f"{''.join(sections)}{_errors()}</main>\n</body></html>\n"
    )


_INTRODUCTION = (
    "<p>OpenAI's API for generated text, and what this server adds to it. "
    'The same for machines: <a href="openapi.json">openapi.json</a>.</p>\n'
    "<p>Where the server has API keys, every call but <code>GET /health</code> needs one, as "
    "<code>Authorization: Bearer KEY</code> or <code>X-Api-Key: KEY</code>. Bodies are JSON. "
    "<code>null</code> means that a field was left out; a field that is not listed is refused."
    "</p>\n"
)


def _section(path: str, method: str, call: Schema, parts: Schema) -> str:
    text = [f'<h2 id="{_anchor(method, path)}">{_name(method, path)}</h2>\n']
    text += [f"<p>{_prose(part)}</p>\n" for part in call.get("description", "").split("\n\n")]
    parameters = [
        Row(
            parameter["name"],
            f"{_kind(parameter['schema'], parts)}, in the {parameter['in']}",
            _bounds(parameter["schema"], parameter.get("required", False)),
            parameter.get("description", ""),
        )
        for parameter in call.get("parameters", ())
    ]
    if parameters:
        text += ["<h3>Parameters</h3>\n", _table(parameters)]
    body = call.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        text.append(_body(_followed(body["schema"], parts), parts))
    for status, answer in call["responses"].items():
        for media, content in answer.get("content", {}).items():
            if status.startswith("2"):
                text.append(_answer(status, media, content.get("schema", {}), parts))
    return "".join(text)


def _body(schema: Schema, parts: Schema) -> str:
    """The HTML of a body's fields. Refused fields are listed in a section that can be opened."""
    taken, refused = [], []
    required = schema.get("required", ())
    fields = schema.get("properties", {})
    for name, field in sorted(fields.items(), key=lambda item: item[0] not in required):
        if _is_refused(field):
            harmless = [value for value in field["enum"] if value is not None]
            values = ", ".join(f"`{json.dumps(value)}`" for value in harmless)
            refused.append(Row(name, note=f"but for {values}" if values else ""))
            continue
        row = Row(name, _kind(field, parts), _bounds(field, name in required), _description(field))
        taken.append(row)
        inner = _followed(_not_null(field), parts)
        taken += _inner_rows(name, inner, parts) if "$ref" in str(field) else []
    text = f"<h3>Body</h3>\n{_table(taken)}"
    if refused:
        text += f"<details><summary>{len(refused)} fields of other engines and of OpenAI that are"
        text += f" refused by name</summary>{_table(refused)}</details>\n"
    return text


def _inner_rows(name: str, schema: Schema, parts: Schema) -> Iterator[Row]:
    for inner, field in schema.get("properties", {}).items():
        if not _is_refused(field):
            yield Row(
                f"{name}.{inner}", _kind(field, parts), _bounds(field, False), _description(field)
            )


def _answer(status: str, media: str, schema: Schema, parts: Schema) -> str:
    rows = list(_answer_rows("", _followed(schema, parts), parts))
    head = f"<h3>Answer {escape(status)}, {escape(media)}</h3>\n"
    if not rows:
        return f"{head}<p>{_prose(_KINDS_OF_MEDIA.get(media, _kind(schema, parts)))}</p>\n"
    return head + _table(rows)


_KINDS_OF_MEDIA = {
    "text/event-stream": "Where `stream` is true: events of the same shape, piece by piece, and "
    "`data: [DONE]` at the end.",
    "text/plain": "Text.",
}


def _answer_rows(prefix: str, schema: Schema, parts: Schema) -> Iterator[Row]:
    """A row for each field of an answer. Nested fields are named by their path."""
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        inner = _followed(_not_null(field), parts)
        while inner.get("type") == "array":
            path, inner = f"{path}[]", _followed(_not_null(inner.get("items", {})), parts)
        yield Row(
            path, _kind(field, parts), _default(field), _description(field) or _description(inner)
        )
        yield from _answer_rows(f"{path}.", inner, parts)


def _errors() -> str:
    rows = [
        Row(kind.code, str(kind.http_status), "", (kind.__doc__ or "").split("\n")[0])
        for kind in sorted(_kinds_of_errors(), key=lambda kind: (kind.http_status, kind.code))
    ]
    rows += [Row("not_found", "404", "", "There is no such path.")]
    rows += [Row("method_not_allowed", "405", "", "The path takes another method.")]
    rows.sort(key=lambda row: (row.kind, row.name))
    return (
        '<h2 id="errors">Errors</h2>\n<p>'
        + _prose(
            'An error is `{"error": {"message", "type", "param", "code"}}`; `param` names the '
            "field at fault, where there is one. In a stream it is an event before "
            "`data: [DONE]`. With 429 and 503 the header `Retry-After` says when to come back."
        )
        + f"</p>\n{_table(rows, ('code', 'status', '', 'when'))}"
    )


def _kinds_of_errors() -> Iterator[type[QuireError]]:
    """The classes of the errors that clients can get, one per code. Errors that only occur while a
    server starts are left out."""
    found: dict[str, type[QuireError]] = {}
    waiting: list[type[QuireError]] = [QuireError]
    while waiting:
        kind = waiting.pop(0)
        if not issubclass(kind, (ConfigurationError, SchedulerStalledError)):
            found.setdefault(kind.code, kind)
            waiting += kind.__subclasses__()
    yield from found.values()


def _table(
    rows: Sequence[Row], heads: Sequence[str] = ("field", "type", "default, bounds", "meaning")
) -> str:
    """An HTML table of the rows, without empty columns."""
    columns = [index for index in range(4) if any(row[index] for row in rows)]
    head = "".join(f"<th>{escape(heads[index])}</th>" for index in columns)
    lines = []
    for row in rows:
        cells = [f"<td><code>{escape(row.name)}</code></td>"]
        for index in columns[1:]:
            name = f' data-name="{escape(heads[index])}"' if index < 3 and row[index] else ""
            cells.append(f"<td{name}>{_prose(row[index])}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>\n")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table>\n"


def _anchor(method: str, path: str) -> str:
    return escape("-".join([method, *path.strip("/").replace("{", "").replace("}", "").split("/")]))


def _name(method: str, path: str) -> str:
    kind = escape(method)
    return (
        f'<span class="method {kind}">{kind.upper()}</span><span class="path">{escape(path)}</span>'
    )


def _prose(text: str) -> str:
    """The text as HTML. Text between backticks becomes code."""
    pieces = escape(text, quote=False).split("`")
    if len(pieces) % 2 == 0:  # an odd number of backticks
        return "`".join(pieces)
    return "".join(
        f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces)
    )


def _followed(schema: Schema, parts: Schema) -> Schema:
    """The schema that a reference refers to; any other schema unchanged."""
    return parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _not_null(schema: Schema) -> Schema:
    """The schema's alternative besides null, if there is exactly one; or else the schema."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else schema


def _is_refused(field: Schema) -> bool:
    return "enum" in field and field.get("description") == NOT_SUPPORTED


def _kind(schema: Schema, parts: Schema) -> str:
    """A schema's type in a few words. null is left out, since every field accepts it."""
    schema = _followed(schema, parts)
    if "anyOf" in schema:
        kinds = (_kind(kind, parts) for kind in schema["anyOf"] if kind != {"type": "null"})
        return " or ".join(dict.fromkeys(kinds))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any")
    if not isinstance(kind, str):
        return " or ".join(name for name in kind if name != "null")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}), parts)}"
    inner = schema.get("additionalProperties")
    if kind == "object" and isinstance(inner, dict) and inner:
        return f"object of {_kind(inner, parts)}"
    return str(kind)


def _default(field: Schema) -> str:
    value = field.get("default")
    return "" if value is None else f"default `{json.dumps(value)}`"


def _bounds(field: Schema, is_required: bool) -> str:
    """Text with the bounds and the default of a field's value."""
    phrases = ["required"] if is_required else [_default(field)]
    phrases += [_range(field)]
    phrases += [_range(kind) for kind in field.get("anyOf", ())]
    for inner in ("items", "additionalProperties"):
        if isinstance(field.get(inner), dict) and _range(field[inner]):
            phrases.append(f"each {_range(field[inner])}")
    return ", ".join(dict.fromkeys(phrase for phrase in phrases if phrase))


def _range(schema: Schema) -> str:
    bounds = {name: _number(schema[name]) for name in _RANGES if name in schema}
    if "minimum" in bounds and "maximum" in bounds:
        return f"{bounds['minimum']} to {bounds['maximum']}"
    return ", ".join(_RANGES[name].format(number) for name, number in bounds.items())


def _number(value: float) -> str:
    """The number as text; large powers of two, and such powers minus 1, as 2^n or 2^n-1."""
    size = abs(int(value))
    if size >= 1 << 31:
        if size.bit_count() == 1:
            return f"{'-' if value < 0 else ''}2^{size.bit_length() - 1}"
        if value > 0 and (size + 1).bit_count() == 1:
            return f"2^{size.bit_length()}-1"
    return str(int(value) if value == int(value) else value)


_RANGES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} character",
    "maxLength": "at most {} characters",
    "minItems": "at least {} element",
}


def _description(field: Schema) -> str:
    """The description of a field or of an answer, on one line."""
    return " ".join(str(field.get("description", "")).split())
