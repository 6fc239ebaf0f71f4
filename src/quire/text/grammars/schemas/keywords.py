"""What each JSON Schema keyword is to a grammar: enforced, without effect, or refused.

Drafts 4 to 2020-12. A name that is in none of these tables is an annotation, as JSON Schema has it,
unless it is a keyword in another spelling, which somebody may rely on. Read by `rewriter`.
"""

ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "$vocabulary", "definitions", "id"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "readOnly", "writeOnly"}
    | {"default", "deprecated", "description", "discriminator", "example", "examples", "title"}
    | {"enumDescriptions", "enumNames", "externalDocs", "markdownDescription", "options", "xml"}
)
"""Keywords that constrain nothing, but for a discriminator beside a oneOf. $defs and definitions
are reached through $ref alone."""

SCHEMA_KEYWORDS = frozenset({"items", "additionalItems", "additionalProperties"})
"""Their value is one schema (items: or a list of them)."""

LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Their value is a list of schemas."""


COUNT_KEYWORDS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
"""Their value is a whole number that is not negative."""

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
"""Keyword -> what to do instead. Three of them are draft 3's."""

ENFORCED = SCHEMA_KEYWORDS | LIST_KEYWORDS | COUNT_KEYWORDS | NUMBER_KEYWORDS
ENFORCED |= {"$ref", "const", "enum", "format", "nullable", "pattern", "patternProperties"}
ENFORCED |= {"properties", "required", "type"}

_SPELLINGS = {name.strip("$").lower(): name for name in ENFORCED | REFUSED.keys()}


def meant_keyword(name: str) -> str | None:
    """The keyword of which `name`, which is none, is another spelling: min_length, minlength."""
    return _SPELLINGS.get(name.strip("$").lower().replace("_", "").replace("-", ""))


def is_absent(name: str, value: object) -> bool:
    """Whether `value` is the null that libraries write for a keyword that is not there."""
    return value is None and name not in ("const", "type")


def is_annotation(name: str, value: object) -> bool:
    """Whether a keyword with this value constrains nothing, wherever it stands."""
    is_known = name in ENFORCED or name in REFUSED or meant_keyword(name) is not None
    return is_absent(name, value) or name in ANNOTATIONS or not is_known


TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
