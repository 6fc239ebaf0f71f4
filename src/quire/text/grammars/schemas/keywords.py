"""Classifies JSON Schema keywords for grammars: enforced, without effect, or refused.

Covers drafts 4 to 2020-12. Names outside these tables are annotations, as JSON Schema defines,
unless they are misspelled keywords, on which a caller may rely. Read by `rewriter`.
"""

ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "definitions", "id"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "readOnly", "writeOnly"}
    | {"default", "deprecated", "description", "discriminator", "example", "examples", "title"}
    | {"enumDescriptions", "enumNames", "externalDocs", "markdownDescription", "options", "xml"}
)
"""Keywords without constraints, except for a discriminator next to oneOf. $defs and definitions
are used only through $ref."""

SCHEMA_KEYWORDS = frozenset({"items", "additionalItems", "additionalProperties"})
"""Keywords whose value is one schema; that of items may also be a list of schemas."""

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
"""Keyword -> advice on a replacement. Three of the keywords are of draft 3."""

ENFORCED = SCHEMA_KEYWORDS | LIST_KEYWORDS | COUNT_KEYWORDS | NUMBER_KEYWORDS
ENFORCED |= {"$ref", "const", "enum", "format", "nullable", "pattern", "patternProperties"}
ENFORCED |= {"properties", "required", "type"}

_SPELLINGS = {name.strip("$").lower(): name for name in ENFORCED | REFUSED.keys()}


def meant_keyword(name: str) -> str | None:
    """The keyword that `name` is a misspelling of, such as min_length or minlength; else None."""
    return _SPELLINGS.get(name.strip("$").lower().replace("_", "").replace("-", ""))


def is_absent(name: str, value: object) -> bool:
    """Whether `value` is the null that libraries write for a missing keyword."""
    return value is None and name not in ("const", "type")


def is_annotation(name: str, value: object) -> bool:
    """Whether a keyword with this value has no constraint in any place."""
    is_known = name in ENFORCED or name in REFUSED or meant_keyword(name) is not None
    return is_absent(name, value) or name in ANNOTATIONS or not is_known


TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
