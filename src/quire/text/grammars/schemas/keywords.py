"""What each JSON Schema keyword is to a grammar: enforced, without effect, or refused.

Drafts 4 to 2020-12. A keyword that is in none of these tables is refused by name, since somebody
may rely on it; `x-` names are annotations by custom. Read by `rewriter`.
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

MAP_KEYWORDS = frozenset({"properties", "patternProperties"})
"""Their value is an object of schemas."""

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
    "else": "write the alternatives with anyOf",
    "if": "write the alternatives with anyOf",
    "maxContains": "leave it out",
    "minContains": "leave it out",
    "not": "say what is allowed instead",
    "propertyNames": "use patternProperties with additionalProperties false",
    "then": "write the alternatives with anyOf",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "uniqueItems": "leave it out",
}
"""Keyword -> what to do instead."""

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
