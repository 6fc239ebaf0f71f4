"""Classifies JSON Schema keywords for grammars: enforced, without effect, or refused.

Covers drafts 4 to 2020-12. Names outside these tables are annotations, as JSON Schema defines.
Exceptions are misspelled keywords, which are refused, since the client may rely on them. Read by
`rewriter`.
"""

ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "definitions", "id"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "readOnly", "writeOnly"}
    | {"default", "deprecated", "description", "discriminator", "example", "examples", "title"}
    | {"enumDescriptions", "enumNames", "externalDocs", "markdownDescription", "options", "xml"}
)
"""Keywords that constrain nothing, except for a discriminator next to oneOf. $defs and definitions
are used only through $ref."""

SCHEMA_KEYWORDS = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords whose value is one schema. The value of `items` may also be a list of schemas."""

LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""


COUNT_KEYWORDS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
"""Keywords whose value is a non-negative integer."""

NUMBER_KEYWORDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)

REFUSED = {
    "$dynamicAnchor": "name the schema with $anchor",
    "$dynamicRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$recursiveRef": "use $ref",
    "contains": "say what all items are with items",
    "dependencies": "write the alternatives with anyOf",
    "dependentRequired": "write the alternatives with anyOf",
    "dependentSchemas": "write the alternatives with anyOf",
    "disallow": "say what is allowed instead",
    "divisibleBy": "use multipleOf",
    "else": "write the alternatives with anyOf",
    "extends": "use allOf",
    "if": "write the alternatives with anyOf",
    "maxContains": "leave it out",
    "minContains": "leave it out",
    "not": "say what is allowed instead",
    "propertyNames": "use patternProperties with additionalProperties false",
    "then": "write the alternatives with anyOf",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "uniqueItems": "leave it out",
    "x-guidance": "leave it out",
}
"""Unsupported keyword -> advice on a replacement. Three of the keywords come from draft 3."""

ENFORCED = SCHEMA_KEYWORDS | LIST_KEYWORDS | COUNT_KEYWORDS | NUMBER_KEYWORDS
ENFORCED |= {"$ref", "const", "enum", "format", "nullable", "pattern", "patternProperties"}
ENFORCED |= {"properties", "required", "type"}

_SPELLINGS = {name.strip("$").lower(): name for name in ENFORCED | REFUSED.keys()}


def meant_keyword(name: str) -> str | None:
    """The keyword that `name` misspells, such as minLength for min_length; None if `name` is not
    close to a keyword."""
    return _SPELLINGS.get(name.strip("$").lower().replace("_", "").replace("-", ""))


def is_absent(name: str, value: object) -> bool:
    """True if `value` is a null that libraries write in place of a missing keyword."""
    return value is None and name not in ("const", "type")


def is_annotation(name: str, value: object) -> bool:
    """True if a keyword with this value never constrains anything."""
    is_known = name in ENFORCED or name in REFUSED or meant_keyword(name) is not None
    return is_absent(name, value) or name in ANNOTATIONS or not is_known


TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
