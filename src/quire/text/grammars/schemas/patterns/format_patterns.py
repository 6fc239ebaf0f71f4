"""Regular expressions for the values of JSON Schema's `format`; each matches a whole string.

They have JSON Schema's syntax (ECMA-262), and match only valid values. If a format is not a regular
language, or needs a very long expression, only a part of its values is matched; a comment next to
the expression describes that part.
"""

import base64

_LEAP_CENTURY = "(?:[02468][048]|[13579][26])"  # 00, 04, 08, ...: divisible by 4
_LEAP_YEAR = f"(?:{_LEAP_CENTURY}00|[0-9]{{2}}(?:0[48]|[2468][048]|[13579][26]))"
DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3])"
LOCAL_TIME = rf"{_HOUR}:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?"
"""A time of day without an offset from UTC; seconds are optional."""

TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
"""A time of RFC 3339, without leap seconds."""


def _references(more: str, *, is_absolute: bool) -> str:
    """An expression for URIs (RFC 3986), or for IRIs (RFC 3987) if `more` lists the additional
    characters.

    With `is_absolute`, a scheme is required. A host may be a name or an IPv4 address, but not an
    IPv6 address.
    """
    percent = "%[0-9A-Fa-f]{2}"
    plain = rf"A-Za-z0-9._~!$&'()*+,;=\-{more}"
    segment = f"(?:[{plain}:@]|{percent})"
    host = f"(?:(?:[{plain}:]|{percent})*@)?(?:[{plain}]|{percent})*(?::[0-9]*)?"
    rest = f"(?:/{segment}*)*"
    authority = f"//{host}{rest}|/(?:{segment}+{rest})?"
    behind = rf"(?:\?(?:[/?]|{segment})*)?(?:#(?:[/?]|{segment})*)?"
    absolute = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{authority}|{segment}+{rest})?{behind}"
    relative = f"(?:{authority}|(?:[{plain}@]|{percent})+{rest})?{behind}"
    return absolute if is_absolute else f"(?:{absolute}|{relative})"


_UCS = (
    r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    r"\u{10000}-\u{1fffd}\u{20000}-\u{2fffd}\u{30000}-\u{3fffd}"
)
_LETTERS = r"\u00df-\u00f6\u00f8-\u00ff\u03b1-\u03c1\u03c3-\u03c9\u0430-\u045f"
_SYLLABLES = r"\u3041-\u3096\u4e00-\u9fa5\uac00-\ud7a3"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]?[A-Za-z0-9]){0,30}"
_IDN_LABEL = f"(?:{_LABEL}|[{_LETTERS}{_SYLLABLES}]{{1,12}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,2}}"
"""Host names. Beyond ASCII, only letters with a single form and left-to-right direction: lower-case
Latin, Greek and Cyrillic, Chinese, Japanese and Korean. Labels are short enough even when
encoded."""

_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"{_ATOM}+(?:\.{_ATOM}+)*@{_LABEL}(?:\.{_LABEL})+"
_IDN_ATOM = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~{_UCS}-]"

_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*"
_VARIABLE += r"(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~{_UCS}]|%[0-9A-Fa-f]{{2}}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _regex() -> str:
    """An expression for regular expressions that ECMA-262, Python and Rust accept, with groups up
    to three levels deep."""
    character = r"[^\\^$.*+?()\[\]{}|/\n\r\u2028\u2029]"
    escape = r"\\[dDwWsStnr\\^$.*+?()\[\]{}|/]"
    members = r"(?:[A-Za-z_ .,:;@#%]|a-z|A-Z|0-9|\\[dws\\\]^-])+"
    atom = rf"(?:{character}|{escape}|\.|\[\^?{members}\])"
    count = r"(?:[*+?]|\{[0-9]\})?"
    pieces = f"(?:{atom}{count})"
    for _ in range(3):
        branches = rf"{pieces}*(?:\|{pieces}*)*"
        pieces = rf"(?:(?:{atom}|\((?:\?:)?{branches}\)){count})"
    return rf"\^?{pieces}*\$?"


STANDARD = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}[Tt]{TIME}",
    "idn-email": rf"{_IDN_ATOM}+(?:\.{_IDN_ATOM}+)*@{_IDN_HOST}",
    "idn-hostname": _IDN_HOST,
    "iri": _references(_UCS, is_absolute=True),
    "iri-reference": _references(_UCS, is_absolute=False),
    "json-pointer": _POINTER,
    "regex": _regex(),
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "uri-reference": _references("", is_absolute=False),
    "uri-template": _TEMPLATE,
}
"""Standard formats that llguidance lacks, or for which it allows invalid values: 29 February in any
year, and leap seconds at any minute."""

LOCAL = {"time": LOCAL_TIME, "date-time": f"{DATE}[Tt]{LOCAL_TIME}"}
"""Variants without a UTC offset, for which libraries use the same names. They are used if the
schema's pattern excludes an offset."""

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    forms = [
        f"(?:{_GROUP}:){{7}}{_GROUP}",
        f"(?:{_GROUP}:){{1,7}}:",
        f":(?::{_GROUP}){{1,7}}",
        "::",
    ]
    forms += [f"(?:{_GROUP}:){{1,{7 - num}}}(?::{_GROUP}){{{num}}}" for num in range(1, 7)]
    return f"(?:{'|'.join(forms)})"


def _ipv4_networks() -> str:
    """An expression for IPv4 networks, which have a prefix length, and zero bits after the
    prefix."""
    forms = ["0.0.0.0/0"]
    for length in range(1, 33):
        num_whole, num_bits = divmod(length - 1, 8)
        step = 128 >> num_bits
        last = _BYTE if step == 1 else f"(?:{'|'.join(map(str, range(0, 256, step)))})"
        parts = [_BYTE] * num_whole + [last] + ["0"] * (3 - num_whole)
        forms.append(rf"{'.'.join(parts)}/{length}")
    return "(?:" + "|".join(form.replace(".", r"\.") for form in forms) + ")"


def _ipv6_networks() -> str:
    """An expression for IPv6 networks whose prefix ends at a hexadecimal digit, with :: for the
    zeros."""
    forms = ["::/0", f"(?:{_GROUP}:){{7}}{_GROUP}/128"]
    for num_groups in range(7):
        before = f"(?:{_GROUP}:){{{num_groups}}}"
        for num_digits in range(1, 5):
            group = f"{_HEX}{{1,{num_digits}}}{'0' * (4 - num_digits)}"
            forms.append(f"{before}{group}::/{16 * num_groups + 4 * num_digits}")
    return f"(?:{'|'.join(forms)})"


_IPV6 = _ipv6()
_LENGTH_4 = "/(?:3[0-2]|[12]?[0-9])"
_LENGTH_6 = "/(?:12[0-8]|1[01][0-9]|[1-9]?[0-9])"
_NETWORKS = {"4": _ipv4_networks(), "6": _ipv6_networks()}
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_BASE64_URL = _BASE64.replace("+/", "_-")
_UUID = f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}"


def _jwt() -> str:
    """An expression for JWTs signed by a registered algorithm (RFC 7518), whose header has only alg
    and typ."""
    algorithms = [
        kind + bits for kind in ("HS", "RS", "ES", "PS") for bits in ("256", "384", "512")
    ]
    headers = [f'{{"alg":"{name}","typ":"JWT"}}' for name in (*algorithms, "EdDSA")]
    written = "|".join(
        base64.urlsafe_b64encode(head.encode()).decode().rstrip("=") for head in headers
    )
    segment = "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2,3})?"
    return rf"(?:{written})\.eyJ[A-Za-z0-9_-]{segment}\.[A-Za-z0-9_-]{{4}}{segment}"


def _durations() -> str:
    """An expression for durations (RFC 3339, appendix A): after each unit comes the next smaller
    unit or none."""
    time = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
    day = "[0-9]+D"
    month = f"[0-9]+M(?:{day})?"
    return f"P(?:(?:[0-9]+Y(?:{month})?|{month}|{day})(?:{time})?|{time}|[0-9]+W)"


def _uuids(version: str) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ABab]{_HEX}{{3}}-{_HEX}{{12}}"


OF_LIBRARIES = {
    "base64": _BASE64,
    "base64url": _BASE64_URL,
    "byte": _BASE64,
    "char": r"[\s\S]",
    "cidrv4": _IPV4 + _LENGTH_4,
    "cidrv6": _IPV6 + _LENGTH_6,
    "cuid": "[cC][0-9a-z]{6,}",
    "cuid2": "[0-9a-z]+",
    "date-time-local": f"{DATE}T{LOCAL_TIME}",
    "decimal": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?",
    "e164": r"\+[1-9][0-9]{6,14}",
    "emoji": r"(?:\p{Extended_Pictographic}|\p{Regional_Indicator}{2})+",
    "fraction": r"-?(?:0|[1-9][0-9]*)(?:/[1-9][0-9]*)?",
    "guid": _UUID,
    "hex": f"{_HEX}*",
    "ip": f"(?:{_IPV4}|{_IPV6})",
    "ipv4interface": f"{_IPV4}(?:{_LENGTH_4})?",
    "ipv4network": _NETWORKS["4"],
    "ipv6interface": f"{_IPV6}(?:{_LENGTH_6})?",
    "ipv6network": _NETWORKS["6"],
    "ipvanyaddress": f"(?:{_IPV4}|{_IPV6})",
    "ipvanyinterface": f"(?:{_IPV4}(?:{_LENGTH_4})?|{_IPV6}(?:{_LENGTH_6})?)",
    "ipvanynetwork": f"(?:{_NETWORKS['4']}|{_NETWORKS['6']})",
    "jwt": _jwt(),
    "ksuid": "[A-Za-z0-9]{27}",
    "mac": f"(?:{_HEX}{{2}}:){{5}}{_HEX}{{2}}",
    "multi-host-uri": (
        rf"[a-z][a-z0-9+.\-]*://(?:[A-Za-z0-9._~%-]+(?::[A-Za-z0-9._~-]*)?@)?"
        rf"{_LABEL}(?:\.{_LABEL})*(?::[1-9][0-9]{{0,3}})?"
        rf"(?:,{_LABEL}(?:\.{_LABEL})*(?::[1-9][0-9]{{0,3}})?)*"
        r"(?:/[A-Za-z0-9._~-]*)*(?:\?[A-Za-z0-9._~=&-]*)?"
    ),
    "name-email": f"(?:[A-Za-z][a-z]*(?: [A-Za-z][a-z]*)* <{_EMAIL}>|{_EMAIL})",
    "nanoid": "[A-Za-z0-9_-]{21}",
    "partial-date-time": f"{DATE}T{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{{1,9}})?",
    "time-local": LOCAL_TIME,
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
    **{f"uuid{version}": _uuids(version) for version in "12345678"},
    "xid": "[0-9a-v]{20}",
}
"""Formats of OpenAPI's registry, pydantic, zod and schemars. Next to a pattern, which is more
precise, they are ignored."""

OF_NAMES = {
    "duration": _durations(),
    "email": _EMAIL,
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,3}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _references("", is_absolute=True),
    "uuid": _UUID,
}
"""Expressions for formats that llguidance enforces for values, but not for property names."""
