"""String formats of JSON Schema, as patterns.

They are narrower than their standards where parsers are: no leap seconds, no year 0, no unbounded digits.
"""

from __future__ import annotations

_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = (
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"  # years divisible by 4
)
_DATE = rf"(?:{_YEAR}-(?:{_DAYS})|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = r"T(?:[0-9]{1,6}H(?:[0-9]{1,6}M(?:[0-9]{1,6}S)?)?|[0-9]{1,6}M(?:[0-9]{1,6}S)?|[0-9]{1,6}S)"
_CALENDAR = r"(?:[0-9]{1,4}Y(?:[0-9]{1,6}M(?:[0-9]{1,6}D)?)?|[0-9]{1,6}M(?:[0-9]{1,6}D)?|[0-9]{1,6}D)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_LAST_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,59}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}(?:\.{_LAST_LABEL})?"  # 253 characters at most (RFC 1034)
_ATEXT = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = rf"(?:{_ATEXT}{{1,64}}|{_ATEXT}{{1,20}}(?:\.{_ATEXT}{{1,20}}){{1,2}})"  # 64 characters at most (RFC 5321)

PATTERNS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]{{1,6}}W)$",
    "email": rf"^{_LOCAL}@{_HOST}$",
    "hostname": rf"^{_HOST}$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]{0,5})(?:#|(?:/(?:[^~/]|~[01])*)*)$",
}
"""Formats that become a pattern."""
NATIVE = frozenset({"ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance's own grammars describe well."""
REFUSED = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template"})
"""Formats of the standard that no grammar here describes. Any other format is an annotation."""
